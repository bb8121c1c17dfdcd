"""Engines whose CPU tier is in a host pool, each in a process that does one step after another."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.engines import process
from harness.engines.runs import Device, Run, engine_arguments, model_of, python_of

ENDING = 120.0  # seconds in which an engine that shuts down has ended


class Pooled:
    """A running engine of ``pool_driver``.

    Args:
        device: of the engine.
        folder: of its own, made here.
        run: what it is.
        forced: codes of the refusals that it starts in spite of.
        engine: more of its arguments.

    Raises:
        AssertionError: it did not start; the end of its log.
    """

    def __init__(
        self, device: Device, folder: Path, run: Run, forced: Sequence[str] = (), **engine: Any
    ) -> None:
        folder.mkdir()
        job = {
            "model": str(model_of(run.model, run.kv_heads, run.vllm)),
            "engine": engine_arguments(run) | engine,
            "forced": list(forced),
        }
        (folder / "job.json").write_text(json.dumps(job))
        self._result = folder / "result.json"
        reading, output = os.pipe()
        stdin, self._input = os.pipe()
        self.environment = device.environ(run)
        self._process = process.start(
            "harness.engines.pool_driver",
            [folder / "job.json", self._result],
            self.environment,
            python_of(run.vllm),
            output,
            stdin,
        )
        os.close(output)
        os.close(stdin)
        self.pid = self._process.pid
        self._output = os.fdopen(reading)
        self._log: list[str] = []
        self._hear("ready")

    def _hear(self, word: str) -> None:
        for line in self._output:
            self._log.append(line)
            if line == f"driver: {word}\n":
                return
        raise AssertionError("".join(self._log)[-4000:])

    def do(self, what: str, value: Any = None) -> Any:
        """Let it do one step of ``pool_driver.Watched.step``; return what that saw."""
        os.write(self._input, f"{json.dumps([what, value])}\n".encode())
        self._hear("done")
        return self.result()["seen"]

    def result(self) -> dict[str, Any]:
        """What it wrote last."""
        found: dict[str, Any] = json.loads(self._result.read_text())
        return found

    def end(self) -> dict[str, Any]:
        """Let it shut down; return what it wrote last.

        Raises:
            AssertionError: it failed; the end of its log.
        """
        os.close(self._input)
        self._log += self._output.readlines()
        assert self._process.wait(ENDING) == 0, "".join(self._log)[-4000:]
        self._output.close()
        return self.result()

    def kill(self) -> None:
        """End it as ``kill -9`` does, and wait for all that it had started."""
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait(ENDING)
        self._output.read()  # its workers have it too
        self._output.close()
        os.close(self._input)
