"""Engines of vLLM's CUDA build with kvpatch's wheel on the emulated device: see harness.cuda.

Each is under every kind of delay; `python -m harness.cuda.campaign` has more seeds of each.
"""

import pytest

from harness import releases
from harness.cuda import campaign, emulated, environment

RELEASE = releases.newest_built()
ROUNDS = [("none", 0), *((kind, 1) for kind in campaign.KINDS)]
ENGINES = (
    *("Offloading", "Simple eager", "Simple lazy", "tiering fs", "Multi"),
    *("Offloading, mp", "Offloading, non-contiguous"),
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda")
    campaign.plain(RELEASE, folder)
    every = campaign.engines(folder)
    return campaign.ours(RELEASE, folder, {one: every[one] | {"rounds": ROUNDS} for one in ENGINES})


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_does_what_plain_vllm_does_and_all_it_does_is_ordered(engines, name):
    assert "ended" not in engines[name], engines[name]
    row = campaign.summed(engines[name], RELEASE)
    assert campaign.right(row), row
    assert row["unmaps"] > 0


def test_a_library_of_nvidias_is_seen():
    site = environment.site_of(RELEASE)
    real = str(site / "nvidia/cu13/lib/libcudart.so.13")
    ours = str(emulated.device_of(RELEASE) / "libcudart.so.13")
    stand_in = str(site / "nvidia/cu13/lib/libcublas.so.13")
    found = campaign.of_nvidia([real, ours, stand_in, "/usr/lib/libcuda.so.1"], RELEASE)
    assert found == [real, "/usr/lib/libcuda.so.1"]
