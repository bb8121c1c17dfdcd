"""vllm-ascend's engines on the ACL emulator: static memory, kvcached's, and their comparison.

Needs ``scripts/environment ascend-VERSION``.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from harness import ascend
from harness.models import make_model

# The whole blocks of 128 tokens of the driver's prompts, of 30, 200, 400 and 129 tokens.
STORED = [0, 128, 384, 128]
SERVED_BACK = [[0] * len(STORED), STORED, STORED]
# The driver's ways to offload, by the connectors of the matrix' axes.
OFFLOAD = {"Simple eager": "eager", "Simple lazy": "lazy"}


@cache
def served(release: str, folder: Path, offload: str, kvpatch: str) -> dict[str, Any]:
    """Return what one engine served, on a device of its own.

    Args:
        release: of vllm-ascend.
        folder: for the model and the device.
        offload: ``eager`` or ``lazy``.
        kvpatch: ``0`` for static memory, which computes what transformers does on the CPU too.
    """
    device = folder / f"device-{offload}-{kvpatch}"
    device.mkdir()
    model = make_model(folder / "llama")
    options = {"offload": offload, "expected": kvpatch == "0"}
    words = (str(model), json.dumps(options))
    return ascend.drive(release, device, "ascend_engine", *words, KVPATCH=kvpatch)


def compare(release: str, connector: str, folder: Path) -> dict[str, Any]:
    """Run static and elastic memory with a connector; return the outcome of its cell.

    The keys ``patches``, ``settings`` and ``versions`` are what the engine on elastic memory had.
    """
    static = served(release, folder, OFFLOAD[connector], "0")
    elastic = served(release, folder, OFFLOAD[connector], "1")
    checks = judged(static, elastic)
    said = {name: elastic[name] for name in ("patches", "settings", "versions")}
    return {"right": all(checks.values()), "checks": checks, **said}


def judged(static: dict[str, Any], elastic: dict[str, Any]) -> dict[str, bool]:
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
            [one["cached"] for one in engine["rounds"]] == SERVED_BACK
            for engine in (static, elastic)
        ),
        "nothing is left on the device between the rounds": all(
            one["emptied"] for one in elastic["rounds"]
        ),
    }
