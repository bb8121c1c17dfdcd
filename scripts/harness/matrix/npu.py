"""vllm-ascend's engines on the ACL emulator: static memory, kvcached's, and their comparison.

Needs ``scripts/environment ascend-VERSION``.
"""

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness import ascend
from harness.engines.ascend_engine import BLOCK, DEVICE, LENGTHS, MANY, SMALL
from harness.evidence import of_run
from harness.matrix.recorded import NPU
from harness.models import make_model
from harness.processes import SCRIPTS

# The whole blocks of the driver's prompts.
STORED, EVICTED = ([length // BLOCK * BLOCK for length in lengths] for lengths in (LENGTHS, MANY))
EXECUTED = "executed"  # the file with what the engine on elastic memory executed
SERVED_BACK = [[0] * len(STORED), STORED, STORED]


@dataclass(frozen=True)
class Trial:
    """What the engines of a cell are asked.

    Attributes:
        offload: ``eager`` or ``lazy``.
        load: one of the driver's ``LOADS``.
        device: MiB of its KV cache, of which each has a block.
        cached: by round and prompt, the tokens that are not computed.
    """

    offload: str
    load: str
    device: int
    cached: list[list[int]]


# By the connectors of the matrix' axes. Lazy mode stores what is about to be evicted, so that
# nothing is in the tier of a device that was emptied before.
TRIALS = {
    "Simple eager": Trial("eager", "rounds", DEVICE, SERVED_BACK),
    "Simple lazy": Trial("lazy", "in turn", SMALL, [[0] * len(EVICTED), EVICTED]),
}


@cache
def served(
    release: str,
    folder: Path,
    offload: str,
    kvpatch: str,
    load: str = "rounds",
    device: int = DEVICE,
) -> dict[str, Any]:
    """Return what one engine served, on a device of its own.

    Args:
        kvpatch: ``0`` for static memory, which computes what transformers does on the CPU too.
        load, device: as of ``Trial``.
    """
    name = f"{offload}-{kvpatch}-{load.replace(' ', '-')}-{device}"
    place = folder / f"device-{name}"
    place.mkdir()
    return engine(release, folder, place, name, offload, kvpatch, load, device)


def engine(
    release: str,
    folder: Path,
    place: Path,
    name: str,
    offload: str,
    kvpatch: str,
    load: str = "rounds",
    device: int = DEVICE,
) -> dict[str, Any]:
    """Return what one engine served, on a device that others may have too.

    Args:
        release, folder, offload, kvpatch, load, device: as of ``served``.
        place: the device's folder.
        name: the engine's kvcached name, of which no other engine's is the beginning.
    """
    model = make_model(folder / "llama")
    expected = kvpatch == "0" and load in {one.load for one in TRIALS.values()}
    options = {"offload": offload, "expected": expected, "load": load, "device": device}
    words = (str(model), json.dumps(options))
    own = {"KVPATCH": kvpatch, "KVCACHED_IPC_NAME": f"npu-{os.getpid()}-{name}"}
    if kvpatch != "0":
        path = {"PYTHONPATH": str(SCRIPTS)}
        own |= of_run.recording(folder / EXECUTED, path)
    return ascend.drive(release, place, "ascend_engine", *words, **own)


def compare(release: str, connector: str, folder: Path) -> dict[str, Any]:
    """Run static and elastic memory with a connector; return the outcome of its cell.

    The keys ``settings`` and ``versions`` are what the engine on elastic memory had, and
    ``executed`` the digests of the units that it executed.
    """
    trial = TRIALS[connector]
    static, elastic = (
        served(release, folder, trial.offload, kvpatch, trial.load, trial.device)
        for kvpatch in ("0", "1")
    )
    checks = judged(static, elastic, trial)
    said = {name: elastic[name] for name in ("settings", "versions")}
    said["executed"] = of_run.digests(NPU, folder / EXECUTED, elastic["patches"])
    return {"right": all(checks.values()), "checks": checks, **said}


def judged(static: dict[str, Any], elastic: dict[str, Any], trial: Trial) -> dict[str, bool]:
    """Return what is compared, and whether it is right."""
    return {
        "static memory has the tokens of transformers on the CPU": all(
            one["tokens"] == static["expected"] for one in static["rounds"]
        ),
        "elastic memory has the tokens of static memory": (
            [one["tokens"] for one in elastic["rounds"]]
            == [one["tokens"] for one in static["rounds"]]
        ),
        "both are served back from the CPU tier": all(
            [one["cached"] for one in engine["rounds"]] == trial.cached
            for engine in (static, elastic)
        ),
        "no block is in use after a round": (
            elastic["rounds"][-1]["emptied"]
            and all(one.get("emptied", True) for one in elastic["rounds"])
        ),
    }
