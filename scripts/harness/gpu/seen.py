"""What a step is asked, and what it saw: in a file of its own from the first fact on."""

import shutil
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import processes, provenance

RIGHT, WRONG, UNSEEN, NEEDS_CUDA = "right", "wrong", "not seen", "needs CUDA"


@dataclass(frozen=True)
class Job:
    """What a step is asked.

    Attributes:
        output: the folder of all result files.
        host: it runs on the host device.
        model: of the operator; empty for random weights.
        tier_gib: size of the CPU tier.
        options: more of ``vllm serve``, as its command line has them.
    """

    step: str
    output: str
    host: bool
    model: str = ""
    tier_gib: float = 4
    options: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        """The result file."""
        return Path(self.output, f"{self.step}.json")

    def logs(self) -> Path:
        """Return the folder of logs, which come back with the results."""
        folder = Path(self.output, "logs")
        folder.mkdir(exist_ok=True)
        return folder

    def environment(self, folder: Path, **changes: str) -> dict[str, str]:
        """Return the environment of an engine whose device, on the host, is in a folder."""
        changes = {"KVPATCH_STATUS_DIR": str(folder)} | changes
        if self.host:
            return processes.on_host_device(folder, **processes.ONE_THREAD | changes)
        from importlib.util import find_spec

        # vLLM takes FlashInfer's sampler where it finds a GPU, and not where it finds FlashInfer.
        sampler = {} if find_spec("flashinfer") else {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
        return processes.with_harness(**sampler | changes)


@dataclass
class Seen:
    """What a step saw; every change is in its file at once.

    Attributes:
        right, wrong: what was compared, in words.
        missing: what was not seen, and why.
    """

    path: Path
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """Right, wrong or not seen."""
        return state(self.content())

    def note(self, **facts: Any) -> None:
        """Note facts, and print them."""
        self.facts |= facts
        for name, value in facts.items():
            print(f"{name}: {value}", flush=True)
        self._write()

    def check(self, what: str, holds: bool, otherwise: str = "") -> None:
        """Note whether something holds, and what there was otherwise."""
        words = f"{what}: {otherwise}" if otherwise and not holds else what
        (self.right if holds else self.wrong).append(words)
        print(f"{'ok' if holds else 'WRONG'}: {words}", flush=True)
        self._write()

    def miss(self, why: str) -> None:
        """Note what was not seen."""
        self.missing.append(why)
        print(f"not seen: {why}", flush=True)
        self._write()

    def content(self) -> dict[str, Any]:
        """Return what its file has."""
        found = asdict(self)
        del found["path"]
        return found

    def _write(self) -> None:
        provenance.write(self.content(), self.path)


def arguments(words: Iterable[str]) -> dict[str, Any]:
    """Return options of ``vllm serve`` by name, as ``harness.serve`` takes them.

    Raises:
        ValueError: a word is no option, and no option's value.
    """
    found: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word.removeprefix("--").partition("=")
            found[name] = value or True
        elif name:
            found[name] = word
            name = ""
        else:
            raise ValueError(f"{word!r} is no option of vllm serve")
    return found


def state(content: dict[str, Any]) -> str:
    """Return the state of what a result file has."""
    if content["wrong"]:
        return WRONG
    return UNSEEN if content["missing"] or not content["right"] else RIGHT


def vllm() -> list[str]:
    """Return the command of the vLLM beside this Python, wherever its environment was moved to."""
    found = Path(sys.executable).with_name("vllm")
    beside = found if found.exists() else shutil.which("vllm")
    return [sys.executable, str(beside)]
