"""SimpleCPUOffloadConnector with sliding windows that an older release keeps only when asked."""

from dataclasses import replace

import pytest

from harness import releases
from harness.engines.fixtures import LAYOUTS
from harness.engines.oracle import PLAIN, assert_same_round, cached

COUNT = 8  # prompts of 21 blocks on 139
# What the device cannot keep, the same again, and then more than the CPU tier can keep.
ROUNDS = (str(COUNT), str(COUNT), "12")
ROWS = 280  # blocks of the CPU tier
# Up to 0.21 an engine with a connector keeps all blocks of a sliding window unless it is asked
# not to, and a block is that of all layers.
WINDOWS_ASKED_FOR = releases.between("0.19", before="0.22")


@pytest.mark.parametrize("vllm", WINDOWS_ASKED_FOR)
@LAYOUTS
def test_windows_that_were_asked_for_are_right_in_lazy_mode(engine, vllm, contiguous):
    plain = replace(PLAIN, model="sliding", vllm=vllm, rounds=(str(COUNT),) * 2)
    expected = engine(plain).round(0)
    ours = engine(
        replace(
            plain,
            kvpatch=True,
            offload=True,
            contiguous=contiguous,
            simple="lazy",
            windows=True,
            cpu_blocks=ROWS,
            rounds=ROUNDS,
        )
    )
    for index in range(len(ROUNDS)):
        assert_same_round(ours.round(index)[:COUNT], expected)
    assert cached(ours.round(0)) == 0
    assert cached(ours.round(1)) >= 0.95 * COUNT * 640
    assert "KV on elastic memory: yes" in ours.log
    assert ours.result["groups"] > 1
    seen = ours.result["simple"]
    assert seen["loaded"] >= 0.95 * COUNT * 20
    assert seen["evicted"] > 0
    assert seen["changed"] == seen["pinned"] == 0
    assert seen["twice"] == []
    assert seen["device_calls"] == {}
    assert seen["managers"] == 1
    assert seen["tiers"] == dict.fromkeys(("scheduler", "worker", "memory"), ROWS)
