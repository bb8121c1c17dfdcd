"""Processes of engines: each a fork of a server that has imported what vLLM imports."""

import atexit
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO

# Servers of one process, each of which has half a gigabyte.
SERVERS = 3
# What only vLLM, kvcached and kvpatch read, or a fork reads anew. Everything else may be read by
# an import, and so a server has it as its forks do.
LATE = (
    *("VLLM", "KVCACHED", "ENABLE_KVCACHED", "KVPATCH", "HARNESS"),
    *("PYTHONHASHSEED", "XDG_DATA_HOME"),
)
START_SECONDS = 600

# What an engine imports sooner or later; a release may not have all of it.
ROOTS = (
    *("vllm.entrypoints.llm", "vllm.v1.engine.core", "vllm.v1.engine.llm_engine"),
    *("vllm.v1.worker.cpu_worker", "vllm.v1.worker.gpu.model_runner"),
    *("vllm.model_executor.models.llama", "vllm.model_executor.models.gemma3"),
    *("vllm.model_executor.models.deepseek_v2", "vllm.model_executor.models.granitemoehybrid"),
    # kvcached imports it to patch it.
    "vllm.distributed.kv_transfer.kv_connector.v1.nixl_connector",
    *("compressed_tensors", "torch.export", "torch._dynamo", "transformers.modeling_utils"),
    "transformers.models.llama.modeling_llama",
    *("transformers.models.auto.tokenization_auto", "transformers.models.auto.processing_auto"),
)
# And what ``vllm serve`` imports besides.
SERVING = (
    *ROOTS,
    *("vllm.entrypoints.cli.main", "vllm.entrypoints.cli.serve"),
    "vllm.entrypoints.openai.api_server",
)
# Runs in the environment of a release, with kvpatch off.
IMPORTS = """
import importlib, json, sys
from contextlib import suppress
for name in json.loads(sys.argv[1]):
    with suppress(ImportError):
        importlib.import_module(name)
print(json.dumps(list(sys.modules)))
"""


class Forked:
    """A process that a ``ForkServer`` started; used as a ``subprocess.Popen`` is.

    Attributes:
        pid: its process id.
        returncode: its exit status, None while it runs.
    """

    def __init__(self, pipe: Connection, args: list[str]) -> None:
        self._pipe = pipe
        self._args = args
        self._waiting = threading.Lock()  # the exit status is sent once
        self.returncode: int | None = None
        self.pid = self._receive(START_SECONDS)

    def _receive(self, timeout: float | None) -> int:
        if not self._pipe.poll(timeout):
            raise subprocess.TimeoutExpired(self._args, timeout or 0)
        try:
            return int(self._pipe.recv())
        except EOFError as error:
            what = " ".join(self._args)
            raise RuntimeError(f"the fork server ended before {what}") from error

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        with self._waiting:
            self._end(timeout)
        return int(self.returncode or 0)

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs, or while another thread waits for it."""
        if self._waiting.acquire(blocking=False):
            try:
                with suppress(subprocess.TimeoutExpired):
                    self._end(0)
            finally:
                self._waiting.release()
        return self.returncode

    def _end(self, timeout: float | None) -> None:
        if self.returncode is None:
            self.returncode = self._receive(timeout)
            self._pipe.close()

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkServer:
    """One ``fork_server``, which ends when this process does."""

    def __init__(self, python: str, early: Mapping[str, str], serving: bool = False) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = dict(early) | {"KVPATCH": "0", "PYTHONHASHSEED": "0"}
        modules = modules_of(python, early, serving)
        command = [python, "-m", "harness.engines.fork_server", str(modules)]
        with theirs:
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=environment)
        self._forks: list[Forked] = []
        self.asked = 0  # callers that are about to start a fork

    @property
    def idle(self) -> bool:
        """Whether none of its forks runs, or is about to."""
        return not self.asked and all(fork.poll() is not None for fork in self._forks)

    def start(
        self,
        module: str,
        arguments: list[str],
        environment: Mapping[str, str],
        stdin: int,
        stdout: int,
    ) -> Forked:
        """Run ``main`` of a module in a fork."""
        request = {"module": module, "arguments": arguments, "environment": dict(environment)}
        reading, writing = Pipe(duplex=False)
        with self._lock:
            with writing:
                message = json.dumps(request).encode()
                descriptors = [stdin, stdout, stdout, writing.fileno()]
                socket.send_fds(self._socket, [message], descriptors)
            fork = Forked(reading, [module, *arguments])
            self._forks = [one for one in self._forks if one.poll() is None] + [fork]
        return fork

    def close(self) -> None:
        """End it, and every fork that still runs."""
        self._socket.close()
        self._process.wait()


def modules_of(python: str, early: Mapping[str, str], serving: bool = False) -> Path:
    """Return the file with the modules that vLLM imports, written once for an environment."""
    folder = Path(python).parents[1] / "vllm-cache"
    triton = "interpreter" if early.get("TRITON_INTERPRET") == "1" else "none"
    path = folder / f"modules-{'serving-' if serving else ''}triton-{triton}.json"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        said = subprocess.run(
            [python, "-c", IMPORTS, json.dumps(SERVING if serving else ROOTS)],
            env=dict(early) | {"KVPATCH": "0", "VLLM_NO_USAGE_STATS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(said.stdout.splitlines()[-1])
        partial.rename(path)
    return path


_servers: dict[tuple[str, bool, tuple[tuple[str, str], ...]], ForkServer] = {}
_lock = threading.Lock()


def server_of(python: str, environment: Mapping[str, str], serving: bool = False) -> ForkServer:
    """Return the server of a Python, started if need be; it stays until its fork is started."""
    early = {name: value for name, value in environment.items() if not name.startswith(LATE)}
    key = python, serving, tuple(early.items())
    with _lock:
        server = _servers.pop(key, None) or ForkServer(python, early, serving)
        _servers[key] = server  # the last one used is the last to go
        server.asked += 1
        idle = [one for one in _servers if _servers[one].idle]
        for old in idle[: max(0, len(_servers) - SERVERS)]:
            _servers.pop(old).close()
    return server


@atexit.register
def close_servers() -> None:
    """End every server of this process."""
    with _lock:
        while _servers:
            _servers.popitem()[1].close()


def start(
    module: str,
    arguments: Sequence[str | Path],
    environment: Mapping[str, str],
    python: str,
    stdout: IO[str] | IO[bytes] | int,
    stdin: IO[str] | int = subprocess.DEVNULL,
    serving: bool = False,
) -> Forked:
    """Start ``main`` of a driver with its arguments, in a process of its own.

    Args:
        module: of the driver.
        arguments: of its ``main``.
        environment: the whole of it.
        python: of the release's environment.
        stdout: a file or descriptor for output and errors.
        stdin: one to read from.
        serving: it runs ``vllm serve``, which imports more than an engine does.
    """
    server = server_of(python, environment, serving)
    try:
        with Path(os.devnull).open() as nothing:
            given = nothing if stdin == subprocess.DEVNULL else stdin
            descriptors = [one if isinstance(one, int) else one.fileno() for one in (given, stdout)]
            return server.start(module, [str(one) for one in arguments], environment, *descriptors)
    finally:
        with _lock:
            server.asked -= 1
