"""``vllm serve`` on loopback, from its start until nothing of it is left."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from harness.console import HarnessError, interrupts
from harness.model_cache import CACHE
from harness.processes import on_host_device
from kvpatch.verify.child import adopt_orphans, free_port, reason, session

MODEL_NAME = "demo"
DEVICE_SIZE = "1GiB"
# kvcached keeps up to 10 spare pages, which suits a GPU; this device is a small one.
SPARE_PAGES = {"KVCACHED_MIN_RESERVED_PAGES": "1", "KVCACHED_MAX_RESERVED_PAGES": "2"}

START_SECONDS = 600
STOP_SECONDS = 30
START_STOP_SECONDS = 3
REQUEST_SECONDS = 120
POLL_SECONDS = 0.2

_PR_SET_PDEATHSIG = 1


class Metrics:
    """One reading of a server's ``/metrics``."""

    def __init__(self, exposition: str) -> None:
        families = text_string_to_metric_families(exposition)
        self.samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a series over all labels that are not given; 0 without one."""
        return sum(
            sample.value
            for sample in self.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


def words(options: Mapping[str, Any]) -> list[str]:
    """Return options of ``vllm serve`` by name as its command line has them.

    True is a flag, a dictionary is passed as JSON, and what is None or False is left out.
    """
    line: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        line.append(f"--{name.replace('_', '-')}")
        if value is not True:
            line.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return line


class Server:
    """One ``vllm serve``: started by its ``with`` block, gone with its children after it.

        with Server(model, {"dtype": "float32"}, environment, folder) as server:
            answer = server.complete({"tokens": [5, 6, 7], "max_tokens": 8})
            loaded = server.metric("vllm:kv_offload_load_bytes_total")

    It listens on 127.0.0.1, with vLLM's development routes (``/collective_rpc``,
    ``/reset_prefix_cache``) on.

    Args:
        model: folder of the model.
        arguments: of ``vllm serve`` by name, with ``-`` or ``_``, as ``words`` takes them.
        environment: of the process, complete. What kvcached leaves under its
            ``KVCACHED_IPC_NAME`` is removed at the end.
        folder: for the log, ``serve.log``.
        name: of the server in messages.
        log: a file for the log instead.
        port: to listen on; None for a free one.
        wait: enter the block when the server is ready. Without it, ``ready`` has to be polled,
            so that several servers can start at once.
        sweep: remove shared memory and sockets that its processes leave.

    Attributes:
        port, url, log_path: as they are.
        environment: of its processes.
        client: an HTTP client of the server; its requests may come from several threads.
        start_seconds: from the start to the first answer; None before.
    """

    def __init__(
        self,
        model: Path,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        folder: Path,
        *,
        name: str = "vLLM",
        log: Path | None = None,
        port: int | None = None,
        wait: bool = True,
        sweep: bool = True,
    ) -> None:
        self.name = name
        self.model = model
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log or folder / "serve.log"
        self.start_seconds: float | None = None
        self._wait, self._sweep = wait, sweep
        self._options = {key.replace("_", "-"): value for key, value in arguments.items()}
        self.environment = {**environment, "VLLM_SERVER_DEV_MODE": "1"}
        self._shared: set[Path] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self.client = httpx.Client(base_url=self.url, timeout=REQUEST_SECONDS, trust_env=False)

    def __enter__(self) -> Server:
        try:
            with interrupts.deferred():
                self._start()
            while self._wait and not self.ready():
                time.sleep(POLL_SECONDS)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The API server's process."""
        assert self._process is not None, "the server is not started"
        return self._process

    @property
    def offloads(self) -> bool:
        """Whether it has a connector."""
        return self.has("kv-transfer-config")

    def has(self, option: str) -> bool:
        """Return whether it was started with an option of ``vllm serve``."""
        return option in self._options

    @property
    def log(self) -> str:
        """Everything the server printed so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def status_lines(self) -> list[str]:
        """kvpatch's status lines in this server's log."""
        return re.findall(r"kvpatch \S+: pid \d+, .*KV on elastic memory: .*", self.log)

    @property
    def elastic(self) -> bool:
        """Whether a status line reports the KV cache on elastic memory."""
        return any("KV on elastic memory: yes" in line for line in self.status_lines)

    def ready(self) -> bool:
        """Return whether the server answers.

        Raises:
            HarnessError: it has ended, or has been starting for too long.
        """
        if self.start_seconds is not None:
            return True
        if self.process.poll() is not None:
            raise self.failure("ended during start-up")
        passed = time.monotonic() - self._begun
        with suppress(httpx.HTTPError):
            if self.client.get("/health", timeout=2).status_code == 200:
                self.start_seconds = passed
                return True
        if passed > START_SECONDS:
            raise self.failure(f"did not answer within {START_SECONDS} s")
        return False

    def complete(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        """Complete token ids greedily; return ``tokens`` and ``logprobs``.

        Args:
            prompt: ``tokens``, and how many to generate, ``max_tokens``.
        """
        answer = self.client.post(
            "/v1/completions",
            json={
                "prompt": prompt["tokens"],
                "max_tokens": prompt["max_tokens"],
                "temperature": 0,
                "logprobs": 1,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        return {"tokens": choice["token_ids"], "logprobs": choice["logprobs"]["token_logprobs"]}

    def rpc(self, method: str) -> list[Any]:
        """Call ``method`` of every worker; return their answers."""
        answer = self.client.post("/collective_rpc", json={"method": method})
        answer.raise_for_status()
        return list(answer.json()["results"])

    def kvpatch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run kvpatch's command as its operator does."""
        return subprocess.run(
            [sys.executable, "-m", "kvpatch", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=REQUEST_SECONDS,
            check=False,
        )

    def metrics(self) -> Metrics:
        """Read ``/metrics``."""
        return Metrics(self.client.get("/metrics").text)

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of one series, as ``Metrics.total`` does."""
        return self.metrics().total(name, **labels)

    def reset_caches(self) -> None:
        """Empty the prefix cache, and the CPU tier where there is one.

        Raises:
            HarnessError: it was refused for too long.
        """
        deadline = time.monotonic() + REQUEST_SECONDS
        external = str(self.offloads).lower()
        while time.monotonic() < deadline:
            answer = self.client.post("/reset_prefix_cache", params={"reset_external": external})
            if answer.status_code == 200 and answer.json()["success"]:
                return
            time.sleep(POLL_SECONDS)  # vLLM refuses while copies are in flight
        raise HarnessError(f"{self.name} did not reset its prefix cache")

    def failure(self, what: str) -> HarnessError:
        """Return an error with the end of the log and its likeliest reason."""
        status = None if self._process is None else self._process.poll()
        ended = "" if status is None else f" (exit status {status})"
        lines = [line for line in self.log.splitlines() if line.strip()]
        tail = "\n".join(f"  | {line[:300]}" for line in lines[-25:])
        return HarnessError(
            f"last lines of the log of {self.name}:\n{tail}\n"
            f"{self.name} {what}{ended}: {reason(lines)}"
        )

    def processes(self) -> list[psutil.Process]:
        """Return the processes of the server's session, EngineCore and workers included.

        Those that have ended are reaped; one stays in the list until its last thread is gone
        and its memory with it.
        """
        self.process.poll()
        return session(self.process.pid)

    def memory(self) -> int:
        """Return the bytes of host memory of all its processes, shared pages counted once."""
        return sum(process.memory_full_info().pss for process in self.processes())

    def _start(self) -> None:
        adopt_orphans()
        self._begun = time.monotonic()
        here = {"host": "127.0.0.1", "port": self.port}
        with self.log_path.open("wb") as log:
            self._process = self._launch(words(here | self._options), log)

    def _launch(self, options: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start it in a session of its own, in which every descendant can be found."""
        libc = ctypes.CDLL(None)
        # Through the interpreter: an environment that was moved has another in vllm's first line.
        command = [sys.executable, str(Path(sys.executable).with_name("vllm")), "serve"]
        return subprocess.Popen(
            [*command, str(self.model), *options],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A terminal's Ctrl-C does not reach it.
            start_new_session=True,
            # It ends with the thread that started it, even if that is killed.
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )

    def _end(self) -> None:
        """Stop every process of the server and remove what they left behind."""
        with interrupts.deferred():
            self.client.close()
            if self._process is None:
                return
            self._note_shared_memory(self.processes())
            if self._process.poll() is None:
                # As Ctrl-C in a terminal, so that kvcached and vLLM clean up themselves.
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGINT)
            # A server that is still starting ignores it for long, and has nothing to lose.
            limit = START_STOP_SECONDS if self.start_seconds is None else STOP_SECONDS
            deadline = time.monotonic() + limit
            while self.processes() and time.monotonic() < deadline:
                time.sleep(0.05)
            deadline = time.monotonic() + STOP_SECONDS
            while (left := self.processes()) and time.monotonic() < deadline:
                self._note_shared_memory(left)
                for process in left:
                    with suppress(psutil.Error):
                        process.kill()
                time.sleep(0.05)
            self._process.wait()
            if self._sweep:
                self._remove_leftovers()

    def _note_shared_memory(self, processes: Iterable[psutil.Process]) -> None:
        """Note the segments that processes have mapped; vLLM's names are random."""
        for process in processes if self._sweep else ():
            with suppress(psutil.Error):
                paths = {Path(region.path) for region in process.memory_maps()}
                self._shared |= {path for path in paths if path.parent == Path("/dev/shm")}

    def _remove_leftovers(self) -> None:
        if name := self.environment.get("KVCACHED_IPC_NAME"):
            self._shared |= set(Path("/dev/shm").glob(f"*{name}*"))
            for path in Path("/tmp").glob(f"kvcached-tp-{name}-*"):
                shutil.rmtree(path, ignore_errors=True)
        for path in self._shared:
            path.unlink(missing_ok=True)


def arguments(blocks: int, block_tokens: int, longest: int, together: int) -> dict[str, str]:
    """Return the arguments of ``vllm serve`` that all servers of a comparison share.

    Args:
        blocks: of the KV cache.
        block_tokens: tokens of each.
        longest: tokens of the longest request.
        together: requests that run at once.
    """
    return {
        "served-model-name": MODEL_NAME,
        "dtype": "float32",  # exact enough that a hit and a recomputation give the same tokens
        "max-model-len": str(longest),
        "max-num-batched-tokens": "2048",
        "max-num-seqs": str(together),
        "block-size": str(block_tokens),
        "num-gpu-blocks-override": str(blocks),
        "seed": "0",
    }


@dataclass(frozen=True)
class Kind:
    """One of the servers that the demo or a benchmark compares.

    Attributes:
        name: in messages.
        slug: in the names of its files and of its shared memory.
        arguments: of ``vllm serve``, by name.
        environment: what it sets besides a clean environment and its host device.
    """

    name: str
    slug: str
    arguments: dict[str, str]
    environment: dict[str, str]

    @property
    def engine(self) -> str:
        """The kvcached name of its engine."""
        return f"kvpatch-harness-{os.getpid()}-{self.slug}"

    def server(
        self, model: Path, folder: Path, logs: Path, port: int | None = None, wait: bool = True
    ) -> Server:
        """Return a server of this kind, with a host device in ``folder``."""
        temporary = folder / "tmp"
        temporary.mkdir(exist_ok=True)
        environment = on_host_device(
            folder,
            DEVICE_SIZE,
            TMPDIR=str(temporary),
            VLLM_CACHE_ROOT=str(temporary / "vllm"),
            VLLM_CONFIG_ROOT=str(temporary / "vllm"),
            # What torch compiles for the first request: 15 s of g++, kept for the next one.
            TORCHINDUCTOR_CACHE_DIR=str(CACHE / "torchinductor"),
            KVCACHED_IPC_NAME=self.engine,
        )
        return Server(
            model,
            {"enforce-eager": True, **self.arguments},
            environment | self.environment,
            folder,
            name=self.name,
            log=logs / f"{self.slug}.log",
            port=port,
            wait=wait,
        )


@contextmanager
def workspace() -> Iterator[Path]:
    """Yield a folder for everything temporary, which is removed afterwards."""
    # vLLM's sockets lie in it, and a socket's path has at most 107 characters.
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 40 else "/tmp"
    with interrupts.deferred():
        folder = Path(tempfile.mkdtemp(prefix="kvpatch-", dir=parent))
    try:
        yield folder
    finally:
        with interrupts.deferred():
            shutil.rmtree(folder, ignore_errors=True)
