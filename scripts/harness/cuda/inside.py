"""Runs in an environment of ``environment``: starts of vLLM, as far as they come without a GPU.

    python inside.py JOBS.json RESULTS.json

It imports vLLM once, and each job is a fork of it. It is run by its path, so that neither the
harness nor the checkout's kvpatch is there.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

# What a GPU's engine imports besides; a release may not have all of it.
MODULES = (
    *("vllm.engine.arg_utils", "vllm.v1.worker.gpu_worker", "vllm.v1.worker.gpu_model_runner"),
    *("vllm.v1.worker.gpu.model_runner", "vllm.v1.engine.core", "vllm.v1.core.sched.scheduler"),
    *("vllm.entrypoints.openai.api_server", "vllm.vllm_flash_attn.flash_attn_interface"),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector",
    "vllm.v1.simple_kv_offload.worker",
)


def configure(job: dict[str, Any]) -> Any:
    """Return the configuration of a job's engine."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=job["model"], **job["engine"]).create_engine_config()


def configuration(job: dict[str, Any]) -> str:
    """Make the configuration; return the runner that vLLM chose."""
    return f"V{1 + bool(getattr(configure(job), 'use_v2_model_runner', False))}"


def device(job: dict[str, Any]) -> str:
    """Go on until the worker initialises its device, where a start without a GPU ends."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu_worker import Worker

    config = configure(job)
    with set_current_vllm_config(config):
        address = f"file://{job['folder']}/rendezvous"
        worker = Worker(config, 0, 0, address, is_driver_worker=True)
        worker.init_device()
    return "a device"


def sizes(job: dict[str, Any]) -> str:
    """Compute what vLLM takes of a device of 80 GiB, as kvpatch lets it be computed."""
    from vllm.utils.mem_utils import MemorySnapshot
    from vllm.v1.worker.utils import request_memory

    config = configure(job)
    snapshot = MemorySnapshot(device="cuda:0", auto_measure=False)
    snapshot.total_memory, snapshot.free_memory = 80 << 30, 79 << 30
    return str(request_memory(snapshot, config.cache_config))


def tier(job: dict[str, Any]) -> str:
    """Make the scheduler's part of the connector; return how many chunks its CPU tier has."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = configure(job)
    model, tokens = config.model_config, config.cache_config.block_size
    heads, size = model.get_total_num_kv_heads(), model.get_head_size()
    layers = range(model.get_total_num_hidden_layers())
    shape = {"num_kv_heads": heads, "head_size": size, "dtype": torch.bfloat16}
    specs = {
        f"model.layers.{n}.self_attn.attn": FullAttentionSpec(block_size=tokens, **shape)
        for n in layers
    }
    with set_current_vllm_config(config):
        resolve_kv_cache_layout(config, [["LBNHC"]], specs.values())
        (cache,) = get_kv_cache_configs(config, [specs], [1 << 30])
        made = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)
    spec = made.connector_scheduler.manager
    return f"{spec._num_chunks} of {2 * len(layers) * tokens * heads * size * 2} bytes"


STEPS = {step.__name__: step for step in (configuration, device, sizes, tier)}


def run(job: dict[str, Any]) -> dict[str, str]:
    """Run a job in this process; return what it came to."""
    os.environ.update(job["environment"])
    try:
        return {"reached": STEPS[job["step"]](job)}
    except BaseException as error:
        said = "".join(traceback.format_exception_only(error)).strip()
        return {"ended": said, "trace": "".join(traceback.format_exception(error))}


def forked(job: dict[str, Any]) -> dict[str, str]:
    """Run a job in a fork; return what it came to."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as file:
            json.dump(run(job), file)
        sys.stdout.flush()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    status = os.waitpid(pid, 0)[1]
    return json.loads(text) if text else {"ended": f"status {status}", "trace": ""}


def described() -> dict[str, Any]:
    """Import vLLM and what a GPU's engine needs of it; return what this is."""
    import vllm
    from vllm.platforms import current_platform

    import kvpatch

    failed = {}
    for name in MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                failed[name] = str(error)
    flash = sys.modules["vllm.vllm_flash_attn.flash_attn_interface"]
    import torch

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "platform": type(current_platform).__name__,
        "capability": str(current_platform.get_device_capability().as_version_str()),
        "kvpatch": kvpatch.__file__,
        "failed": failed,
        "kernels": hasattr(torch.ops._C, "rms_norm") and flash.FA3_AVAILABLE,
    }


def main(jobs: str, results: str) -> None:
    """Run the jobs."""
    found: dict[str, Any] = {"start": described(), "jobs": {}}
    from kvpatch import activation

    found["patches"] = [one.patch.id for one in activation.transaction.applied]
    for name, job in json.loads(Path(jobs).read_text()).items():
        found["jobs"][name] = forked(job)
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
