"""The bytes level: tagged blocks of a release, written through the model's views; no engine.

It shows what no engine on a CPU can: models with latent attention and state-space layers on
releases without kernels for them, and vLLM's other KV layouts.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

from harness import environments, releases
from harness.engines.runs import Device, Run, python_of

# From the first release with KV layouts on.
RELEASES = tuple(dict.fromkeys((*releases.between("0.29"), *environments.BORROWED)))
# By the name of the driver: the model in the matrix, and the layers of the group of a block.
KINDS = {
    "full": ("full attention", 4),
    "sliding": ("sliding window", 2),
    "latent": ("latent attention", 4),
    "hybrid": ("hybrid", 2),
}
LAYOUTS = {True: ("BLHNC", "BLNHC"), False: ("LBHNC", "LBNHC")}
LIMIT = 300  # seconds


def look(vllm: str, contiguous: bool, device: Device, folder: Path) -> dict[str, Any]:
    """Return what the driver found on a release in one of kvcached's two layouts.

    Raises:
        RuntimeError: it did not end well; with the end of its log.
    """
    result = folder / "result.json"
    environment = device.environ(Run(runner="v2", contiguous=contiguous))
    ended = subprocess.run(
        [python_of(vllm), "-m", "harness.engines.tagged_driver", result],
        env=environment | {"KVPATCH_ALLOW_VLLM": vllm},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(ended.stdout[-4000:])
    return dict(json.loads(result.read_text()))


def right(found: dict[str, Any], kind: str, layout: str) -> bool:
    """Return whether the connector would copy the blocks that the model writes."""
    one = found[f"{kind}-{layout}"]
    layers = KINDS[kind][1]
    return bool(
        one["tags"] == 70 * layers
        and one["wrong"] == 0
        and one["regions"] == (1 if layout.startswith("B") else layers)
        and one["on_kvcached"]
        and one["pool"] == "ElasticBlockPool"
        and one["events"]
    )
