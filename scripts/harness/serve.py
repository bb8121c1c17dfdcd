"""One ``vllm serve`` on loopback, from its start to the last trace of it."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from harness.demo.conversations import MODEL_NAME, REQUEST_SECONDS
from harness.console import interrupts
from harness.console import HarnessError

START_SECONDS = 240
STOP_SECONDS = 15
START_STOP_SECONDS = 3
POLL_SECONDS = 0.2

BLOCK_TOKENS = 32
# 14336 tokens, 112 MiB: two or three of the eight conversations fit.
KV_BLOCKS = 448
TIER_BYTES = 512 << 20
DEVICE_SIZE = "1GiB"
# kvcached keeps up to 10 spare pages, which suits a GPU; this device is a small one.
SPARE_PAGES = {"KVCACHED_MIN_RESERVED_PAGES": "1", "KVCACHED_MAX_RESERVED_PAGES": "2"}

ENGINE_ARGUMENTS = {
    "served-model-name": MODEL_NAME,
    "dtype": "float32",  # exact enough that a hit and a recomputation give the same tokens
    "max-model-len": "8192",
    "max-num-batched-tokens": "2048",
    "max-num-seqs": "2",
    "block-size": str(BLOCK_TOKENS),
    "num-gpu-blocks-override": str(KV_BLOCKS),
    "seed": "0",
}
CONNECTOR = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": TIER_BYTES,
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "kvpatch.hostdevice.offloading",
    },
}

# Kept between runs, beside the environment it was made with.
CACHE = Path(sys.prefix) / "kvpatch-demo"

_OURS = ("KVPATCH", "KVCACHED", "ENABLE_KVCACHED", "VLLM", "PYTHON", "TRITON")
_ELASTIC = "KV on elastic memory: yes"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Kind:
    """Which of the two servers: its name for people, and what it adds."""

    name: str
    slug: str
    arguments: dict[str, str]
    environment: dict[str, str]


# With Triton there, if only its interpreter, vLLM takes the runner that it takes on a GPU.
AS_ON_A_GPU = {"TRITON_INTERPRET": "1"}
PLAIN = Kind("plain vLLM", "plain", {}, {"KVPATCH": "0", **AS_ON_A_GPU})
KVPATCH = Kind(
    "vLLM with kvpatch",
    "kvpatch",
    {"kv-transfer-config": json.dumps(CONNECTOR)},
    {"KVPATCH": "1", **SPARE_PAGES, **AS_ON_A_GPU},
)


@contextmanager
def workspace() -> Iterator[Path]:
    """Yield a folder that is gone afterwards; everything temporary lies in it."""
    # vLLM's sockets lie in it, and a socket's path has at most 107 characters.
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 40 else "/tmp"
    with interrupts.deferred():
        folder = Path(tempfile.mkdtemp(prefix="kvpatch-demo-", dir=parent))
    try:
        yield folder
    finally:
        with interrupts.deferred():
            shutil.rmtree(folder, ignore_errors=True)


class Server:
    """A server that is started by its ``with`` block, and gone with its children after it.

    Args:
        kind: plain vLLM, or with kvpatch.
        model: folder of the model.
        folder: private folder for temporary files and the device's ledger.
        log: file for everything it prints.
        port: the port to listen on; None for a free one.
    """

    def __init__(
        self,
        kind: Kind,
        model: Path,
        folder: Path,
        log: Path,
        port: int | None = None,
    ) -> None:
        self.kind = kind
        self.model = model
        self.log_path = log
        self.start_seconds: float | None = None
        self.peak_memory = 0
        self.port = port or _free_port()
        self._ipc_name = f"kvpatch-demo-{os.getpid()}-{kind.slug}"
        self._shared: set[Path] = set()
        self._process: subprocess.Popen[bytes] | None = None
        # By its interpreter: a folder that was moved has another in the command's first line.
        vllm = Path(sys.executable).with_name("vllm")
        self._command = [sys.executable, str(vllm), "serve", str(model)]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        for name, value in {**ENGINE_ARGUMENTS, **kind.arguments}.items():
            self._command += [f"--{name}", value]
        temporary = folder / "tmp"
        temporary.mkdir(exist_ok=True)
        self._environment = _clean_environment() | {
            "TMPDIR": str(temporary),
            "VLLM_CACHE_ROOT": str(temporary / "vllm"),
            "VLLM_CONFIG_ROOT": str(temporary / "vllm"),
            # What torch compiles for the first request: 15 s of g++, kept for the next one.
            "TORCHINDUCTOR_CACHE_DIR": str(CACHE / "torchinductor"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            "HF_HUB_OFFLINE": "1",
            "KVPATCH_HOST_DEVICE": DEVICE_SIZE,
            "KVPATCH_HOST_DEVICE_DIR": str(folder),
            "KVCACHED_IPC_NAME": self._ipc_name,
            **kind.environment,
        }
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", timeout=REQUEST_SECONDS, trust_env=False
        )

    def __enter__(self) -> Server:
        try:
            with interrupts.deferred():
                self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    @property
    def log(self) -> str:
        """Everything the server printed so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def status_lines(self) -> list[str]:
        """The status lines of kvpatch in this server's processes."""
        return re.findall(r"kvpatch \S+: pid \d+, .*KV on elastic memory: .*", self.log)

    @property
    def elastic(self) -> bool:
        """Whether a process said that its KV cache is on elastic memory."""
        return any(_ELASTIC in line for line in self.status_lines)

    def ready(self) -> bool:
        """Whether the server answers by now.

        Raises:
            HarnessError: it has ended, or has been starting for too long.
        """
        assert self._process is not None
        if self.start_seconds is not None:
            return True
        if self._process.poll() is not None:
            raise self.failure("ended while it was starting")
        passed = time.monotonic() - self._begun
        try:
            if self.client.get("/health", timeout=2).status_code == 200:
                self.start_seconds = passed
                return True
        except httpx.HTTPError:
            pass
        if passed > START_SECONDS:
            raise self.failure(f"did not answer within {START_SECONDS} s")
        return False

    def reset_caches(self) -> None:
        """Empty the KV cache, and the CPU tier where there is one.

        vLLM answers no while copies are in flight, and asks to be asked again.

        Raises:
            HarnessError: it kept answering no.
        """
        deadline = time.monotonic() + REQUEST_SECONDS
        external = str("kv-transfer-config" in self.kind.arguments).lower()
        while time.monotonic() < deadline:
            answer = self.client.post("/reset_prefix_cache", params={"reset_external": external})
            if answer.status_code == 200 and answer.json()["success"]:
                return
            time.sleep(POLL_SECONDS)
        raise HarnessError(f"{self.kind.name} would not reset its prefix cache")

    def failure(self, what: str) -> HarnessError:
        """Return an error that shows what the server printed last."""
        if self._process is None or self._process.poll() is None:
            ended = ""
        else:
            ended = f" (exit status {self._process.returncode})"
        lines = [line for line in self.log.splitlines() if line.strip()]
        tail = "\n".join(f"  | {line[:300]}" for line in lines[-25:])
        return HarnessError(
            f"last lines of the log of {self.kind.name}:\n{tail}\n"
            f"{self.kind.name} {what}{ended}: {reason(lines)}"
        )

    def _start(self) -> None:
        libc = ctypes.CDLL(None)
        # Grandchildren that outlive their parent become ours to reap; in a container
        # without an init nobody else would.
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

        def die_with_the_demo() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

        self._begun = time.monotonic()
        with self.log_path.open("wb") as log:
            # A session of its own: a terminal's Ctrl-C reaches the demo alone, and
            # every descendant can be found by it.
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_the_demo,
            )

    def _end(self) -> None:
        """Stop every process of the server and remove what they left behind."""
        with interrupts.deferred():
            self.client.close()
            if self._process is None:
                return
            pids = self.processes()
            self.peak_memory = sum(peak_resident(pid) for pid in pids)
            self._shared |= _shared_memory_of(pids)
            if self._process.poll() is None:
                # As Ctrl-C in a terminal, so that kvcached and vLLM clean up themselves.
                with _may_be_gone():
                    os.killpg(self._process.pid, signal.SIGINT)
            # One that is still starting ignores it for long, and has nothing to lose.
            limit = START_STOP_SECONDS if self.start_seconds is None else STOP_SECONDS
            deadline = time.monotonic() + limit
            while self.processes() and time.monotonic() < deadline:
                time.sleep(0.05)
            deadline = time.monotonic() + STOP_SECONDS
            while (pids := self.processes()) and time.monotonic() < deadline:
                self._shared |= _shared_memory_of(pids)
                for pid in pids:
                    with _may_be_gone():
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.05)
            self._process.wait()
            self._remove_leftovers()

    def processes(self) -> list[int]:
        """The processes of the server's session, EngineCore and workers included.

        Those that have ended are reaped on the way; one stays in the list until its last
        thread is gone and its memory with it.
        """
        assert self._process is not None
        self._process.poll()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with _may_be_gone():
                pid = int(entry.name)
                if os.getsid(pid) != self._process.pid:
                    continue
                ours = pid != self._process.pid and _parent(pid) == os.getpid()
                if not (ours and os.waitpid(pid, os.WNOHANG)[0] == pid):
                    found.append(pid)
        return found

    def _remove_leftovers(self) -> None:
        for path in self._shared | set(Path("/dev/shm").glob(f"*{self._ipc_name}*")):
            with _may_be_gone():
                path.unlink()
        for path in Path("/tmp").glob(f"kvcached-tp-{self._ipc_name}-*"):
            shutil.rmtree(path, ignore_errors=True)


def reason(lines: list[str]) -> str:
    """Return the line of a log that tells best why a server ended."""
    for line in reversed(lines):
        if "kvpatch refuses to start vLLM" in line:
            return line[line.index("kvpatch refuses") :]
    for line in reversed(lines):
        if found := re.search(r"\b(?:\w+\.)*\w*(?:Error|Exception|Killed)\b: .+", line):
            return found[0]
    return lines[-1] if lines else "it printed nothing"


def peak_resident(pid: int) -> int:
    """Return the most bytes that were ever resident in a process, shared ones included."""
    with _may_be_gone():
        status = Path(f"/proc/{pid}/status").read_text()
        if found := re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE):
            return int(found[1]) << 10
    return 0


@contextmanager
def _may_be_gone() -> Iterator[None]:
    with suppress(ProcessLookupError, ChildProcessError, FileNotFoundError, PermissionError):
        yield


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _shared_memory_of(pids: list[int]) -> set[Path]:
    """Return the segments these processes have mapped; vLLM's names are random."""
    found: set[Path] = set()
    for pid in pids:
        with _may_be_gone():
            maps = Path(f"/proc/{pid}/maps").read_text()
            found |= {Path(name) for name in re.findall(r"(/dev/shm/\S+)$", maps, re.MULTILINE)}
    return found


def _clean_environment() -> dict[str, str]:
    """The caller's environment without what would change a server."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
