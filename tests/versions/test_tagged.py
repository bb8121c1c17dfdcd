"""What an engine on a CPU cannot show, with tagged blocks: see harness/matrix/tagged.py.

Models with latent attention and with state-space layers, and vLLM's other layouts.
"""

from typing import Any

import pytest

from harness.matrix.tagged import KINDS, LAYOUTS, RELEASES, look, right
from kvpatch import supported
from kvpatch.patches import secondary_tiers, simple_offload, suspend

FEATURES = {
    "kvcached-adapters": "applied",
    "host-device": "applied",
    "host-copies": "applied",
    "ascend": "not-needed",
    "elastic-memory": "applied",
    "offloading": "applied",
    "host-pool": "not-needed",
    "fence": "applied",
    "deadlock": "applied",
    "kv-events": "applied",
    "debug": "not-needed",
    "metrics": "applied",
}


@pytest.fixture(scope="module")
def tagged(device, tmp_path_factory):
    """Return what the driver found on a release in one of kvcached's two layouts."""
    found: dict[tuple[str, bool], dict[str, Any]] = {}

    def once(vllm: str, contiguous: bool) -> dict[str, Any]:
        if (vllm, contiguous) not in found:
            folder = tmp_path_factory.mktemp("tagged")
            found[vllm, contiguous] = look(vllm, contiguous, device, folder)
        return found[vllm, contiguous]

    return once


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", [*LAYOUTS[True], *LAYOUTS[False]])
@pytest.mark.parametrize("vllm", RELEASES)
def test_the_connector_copies_the_blocks_that_the_model_writes(tagged, vllm, layout, kind):
    found = tagged(vllm, layout.startswith("B"))["found"]
    assert right(found, kind, layout), found[f"{kind}-{layout}"]


@pytest.mark.parametrize("vllm", RELEASES)
def test_the_patched_functions_of_a_gpu_worker(tagged, vllm):
    worker = dict(tagged(vllm, True)["worker"])
    # From 0.32 on 3 of 50 GiB are weights that another process holds.
    assert worker.pop("budget") == (47 if vllm >= "0.32" else 50)
    if vllm >= "0.31":
        assert worker == {"random": False, "current": True, "left as it was": True}
    else:
        assert worker == {}


@pytest.mark.parametrize("vllm", RELEASES)
def test_every_patch_finds_its_target(tagged, vllm):
    features = dict(tagged(vllm, True)["features"])
    assert features.pop("kvcached-version") == "applied"
    for optional in (simple_offload.FEATURE, secondary_tiers.FEATURE, suspend.FEATURE):
        tested = vllm in supported.validated(optional.span)
        assert features.pop(optional.name) == ("applied" if tested else "outside")
    assert features == FEATURES
