"""KV cache events on elastic memory, against vLLM's own on one schedule."""

from dataclasses import replace

import pytest

from harness.engines.events import RUN, assert_same_events


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "non-contiguous"])
def test_events_come_out_as_from_plain_vllm(engine, contiguous):
    plain = engine(replace(RUN, kvpatch=False))
    assert_same_events(engine(replace(RUN, contiguous=contiguous)), plain)
