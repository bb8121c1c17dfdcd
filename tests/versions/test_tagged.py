"""What an engine on a CPU cannot show, with tagged blocks: see tagged_driver.py.

Models with latent attention and with state-space layers, vLLM's other layouts, and
vLLM 0.33.0, which has no CPU build: its Python alone, as PyPI has it, which kvpatch
refuses unless it is named.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from harness import environments, releases
from harness.engines.runs import Device, Run, python_of
from kvpatch import supported
from kvpatch.patches import secondary_tiers, simple_offload

RELEASES = (*releases.between("0.29"), *environments.PYTHON_ONLY)
FEATURES = {
    "kvcached-adapters": "applied",
    "host-device": "applied",
    "elastic-memory": "applied",
    "offloading-connector": "applied",
    "fence": "applied",
    "standstill": "applied",
    "kv-events": "applied",
    "audit": "not-needed",
    "metrics": "applied",
}
KINDS = {"full": "llama", "sliding": "sliding", "latent": "latent", "hybrid": "hybrid"}


@pytest.fixture(scope="module")
def tagged(
    device: Device, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, bool], dict[str, Any]]:
    """Return what the driver found on a release in one of kvcached's two layouts."""
    found: dict[tuple[str, bool], dict[str, Any]] = {}

    def look(vllm: str, contiguous: bool) -> dict[str, Any]:
        if (vllm, contiguous) not in found:
            result = tmp_path_factory.mktemp("tagged") / "result.json"
            environment = device.environ(Run(runner="v2", contiguous=contiguous))
            ended = subprocess.run(
                [python_of(vllm), "-m", "harness.engines.tagged_driver", result],
                env=environment | {"KVPATCH_ALLOW_VLLM": vllm},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=300,
                check=False,
            )
            assert ended.returncode == 0, ended.stdout[-4000:]
            found[vllm, contiguous] = json.loads(result.read_text())
        return found[vllm, contiguous]

    return look


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC", "LBHNC", "LBNHC"])
@pytest.mark.parametrize("vllm", RELEASES)
def test_the_connector_copies_the_blocks_that_the_model_writes(
    tagged: Callable[[str, bool], dict[str, Any]],
    vllm: str,
    layout: str,
    kind: str,
) -> None:
    contiguous = layout.startswith("B")
    one = tagged(vllm, contiguous)["found"][f"{kind}-{layout}"]
    layers = 2 if kind in ("sliding", "hybrid") else 4  # of the group that owns a block
    assert one["tags"] == 70 * layers
    assert one["wrong"] == 0
    assert one["regions"] == (1 if contiguous else layers)
    assert one["on_kvcached"]
    assert one["pool"] == "ElasticBlockPool"
    assert one["events"]


@pytest.mark.parametrize("vllm", RELEASES)
def test_the_patched_functions_of_a_gpu_worker(
    tagged: Callable[[str, bool], dict[str, Any]], vllm: str
) -> None:
    worker = dict(tagged(vllm, True)["worker"])
    # From 0.32 on 3 of 50 GiB are weights that another process holds.
    assert worker.pop("budget") == (47 if vllm >= "0.32" else 50)
    if vllm >= "0.31":
        assert worker == {"random": False, "current": True, "left as it was": True}
    else:
        assert worker == {}


@pytest.mark.parametrize("vllm", RELEASES)
def test_every_patch_finds_its_target(
    tagged: Callable[[str, bool], dict[str, Any]], vllm: str
) -> None:
    features = dict(tagged(vllm, True)["features"])
    assert features.pop("kvcached-version-override") == "applied"
    for optional in (simple_offload.FEATURE, secondary_tiers.FEATURE):
        tested = vllm in supported.validated(optional.span)
        assert features.pop(optional.name) == ("applied" if tested else "outside")
    assert features == FEATURES
