"""Blocks of other sizes, against plain vLLM; other settings are cells of the matrix."""

import pytest

from harness.engines.oracle import PLAIN
from harness.engines.runs import Run
from harness.engines.tiers import APART, assert_found

SIZES = {64: 48, 128: 24}  # of blocks, and how many the device has


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_what_the_device_lost_comes_back_in_blocks_of_other_sizes(serve, engine, size, contiguous):
    changes = {"block_size": size, "num_gpu_blocks_override": SIZES[size]}
    ours = serve(Run(contiguous=contiguous), times=2, watch=True, engine=changes)
    for time, found in enumerate((0, 640)):
        assert_found(ours, engine(PLAIN), found, time)
    assert ours.result["returned"] >= APART * 640 // size
    assert ours.result["changed"] == []
    assert "KV on elastic memory: yes" in ours.log
