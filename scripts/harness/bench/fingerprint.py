"""scripts/bench-fingerprint: what the fingerprint of a tier's folder adds to an engine's start.

It samples as many layers of a large model as the memory given holds, in bfloat16 and in the
shapes of vLLM's fused tensors, and extrapolates to all layers on one rank: the time is that of
values which each lie in a cache line of their own, and so is proportional to the layers.

Run it on a quiet machine: .venv/bin/python scripts/bench-fingerprint. It prints the result and
writes it to docs/results/fingerprint.json.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

from harness import ROOT, console, provenance

RESULT = ROOT / "docs/results/fingerprint.json"
VERSIONS = ("kvpatch", "torch")
GOAL = 2.0  # seconds, of a model of 70 billion parameters on one rank
BYTES = 2  # of a value
REPETITIONS = 5


@dataclass(frozen=True)
class Shape:
    """A model's tensors.

    Attributes:
        layers: how many it has.
        layer: the shapes of one layer's tensors.
        once: those of the tensors that it has once.
    """

    layers: int
    layer: tuple[tuple[int, ...], ...]
    once: tuple[tuple[int, ...], ...]


def values(shapes: tuple[tuple[int, ...], ...]) -> int:
    """Return how many values tensors have."""
    return sum(map(math.prod, shapes))


MODELS = {
    "Llama 70B": Shape(
        80,
        ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672), (8192,), (8192,)),
        ((128256, 8192), (128256, 8192), (8192,), (131072, 128)),
    ),
    "Qwen3 235B, 128 experts a layer": Shape(
        94,
        (
            *((9216, 4096), (4096, 8192), (128, 4096), (4096,), (4096,)),
            *((128, 3072, 4096), (128, 4096, 1536)),
        ),
        ((151936, 4096), (151936, 4096), (4096,), (40960, 128)),
    ),
}


def measure(shape: Shape, room: int) -> dict[str, Any]:
    """Sample the layers that ``room`` bytes hold, and extrapolate.

    Args:
        shape: of the model.
        room: bytes of memory.
    """
    import torch

    from kvpatch.patches.secondary_tiers.samples import Samples

    layers = (room - BYTES * values(shape.once)) // (BYTES * values(shape.layer))
    groups = [shape.once] + [shape.layer] * min(int(layers), shape.layers)
    tensors = [
        [torch.ones(one, dtype=torch.bfloat16) for one in shapes] for shapes in groups
    ]  # written to, so that the memory is there

    def seconds(part: list[list[Any]]) -> float:
        begun = time.perf_counter()
        samples = Samples()
        for number, group in enumerate(part):
            for place, tensor in enumerate(group):
                samples.add(f"{number}.{place}", tensor)
        samples.digest()
        return time.perf_counter() - begun

    once = statistics.median(seconds(tensors[:1]) for _ in range(REPETITIONS))
    each = statistics.median(seconds(tensors[1:]) for _ in range(REPETITIONS)) / (len(groups) - 1)
    return {
        "layers": shape.layers,
        "measured_layers": len(groups) - 1,
        "measured_gib": round(BYTES * sum(map(values, groups)) / (1 << 30), 2),
        "seconds_once": round(once, 4),
        "seconds_each_layer": round(each, 4),
        "seconds_extrapolated": round(once + each * shape.layers, 2),
        "parameters_billions": round(
            (values(shape.once) + shape.layers * values(shape.layer)) / 1e9, 1
        ),
    }


def main() -> int:
    """Run the benchmark; return 1 if the goal was missed."""
    parser = console.parser("scripts/bench-fingerprint", __doc__ or "")
    parser.add_argument("--gib", type=float, default=12, help="memory for the tensors")
    arguments = parser.parse_args()
    import torch

    command = f"scripts/bench-fingerprint --gib {arguments.gib:g}"
    result: dict[str, Any] = {
        **provenance.header(command),
        "versions": provenance.versions(VERSIONS),
        "goal_seconds": GOAL,
        "threads": torch.get_num_threads(),
        "models": {},
    }
    for name, shape in MODELS.items():
        result["models"][name] = measure(shape, int(arguments.gib * (1 << 30)))
    provenance.write(result, RESULT)
    print(json.dumps(result, indent=1))
    return int(result["models"]["Llama 70B"]["seconds_extrapolated"] > GOAL)
