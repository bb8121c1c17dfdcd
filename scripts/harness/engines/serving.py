"""``vllm serve`` for tests over HTTP."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from harness.engines import plugins, process
from harness.engines.runs import Device, Run, engine_arguments, prompts, weights_of
from harness.serve import Server
from kvpatch import control


def eventually(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Poll ``condition`` until it holds; stats arrive after the answer they belong to."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def answers(server: Server, count: int) -> list[list[int]]:
    """Return the tokens of the answers to the first prompts, asked one at a time."""
    return [server.complete(prompt)["tokens"] for prompt in prompts(count)]


class Forked(Server):
    """A server that is a fork of a ``ForkServer``, and whose engine and workers are forks of it.

    Args:
        job: more of the job of ``served``, whose file lies beside the log.
    """

    def __init__(
        self,
        model: Path,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        folder: Path,
        *,
        python: str = sys.executable,
        job: Mapping[str, Any] | None = None,
        sweep: bool = True,
    ) -> None:
        super().__init__(model, arguments, environment, folder, sweep=sweep)
        self._python, self._job = python, job or {}

    def _launch(self, options: list[str], log: IO[bytes]) -> Any:
        job = self.log_path.with_name("job.json")
        job.write_text(json.dumps({"model": str(self.model), "options": options, **self._job}))
        return process.start(
            "harness.engines.served", [job], self.environment, self._python, log, serving=True
        )


def watched(
    run: Run,
    device: Device,
    folder: Path,
    *plugged: Callable[[], None],
    fresh: bool = False,
    **arguments: Any,
) -> Server:
    """Return a server with ``TransferProbe`` in its workers, after which nobody clears up.

    Args:
        run: its engine's.
        device: of the engine.
        folder: for its log and its plug-ins, made here.
        plugged: those of ``plugins``.
        fresh: it and its engine are Pythons of their own, as an operator's are on a CPU, which
            takes them half a minute.
        arguments: more of them, or others.
    """
    folder.mkdir(exist_ok=True)
    environment = device.environ(run) | {plugins.GATE: str(folder / "gate")}
    if plugged:
        place = plugins.install(folder / "plugin", *(one.__name__ for one in plugged))
        environment["PYTHONPATH"] = os.pathsep.join((place, environment["PYTHONPATH"]))
    probe = {"worker_extension_cls": "harness.engines.probe.TransferProbe"}
    made = Server if fresh else Forked
    given = {**engine_arguments(run), **arguments, **probe}
    return made(weights_of(run), given, environment, folder, sweep=False)


@dataclass
class Asked:
    """A server whose engine listens, and is asked the same again and again.

    Attributes:
        name: its kvcached name.
        first: its ``answers`` before anything was done with it.
    """

    server: Server
    name: str
    first: list[list[int]]
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))

    @property
    def engine(self) -> control.Engine:
        return control.find(self.name)

    def begin(self, prompt: dict[str, Any]) -> Future[Any]:
        return self.pool.submit(self.server.complete, prompt)

    def begin_and_see(self, prompt: dict[str, Any]) -> Future[Any]:
        """Begin a request, in the middle of which the engine stops until it is asked something."""
        gate = Path(self.server.environment[plugins.GATE])  # of ``stop_when_running``
        gate.touch()
        running = self.begin(prompt)
        assert eventually(lambda: not gate.exists(), 120)
        return running

    def again(self) -> None:
        """Ask everything again, and assert the same answers."""
        assert answers(self.server, len(self.first)) == self.first

    def loaded(self) -> int:
        """Tokens that came from the tier so far."""
        return int(self.server.metric("vllm:external_prefix_cache_hits_total"))
