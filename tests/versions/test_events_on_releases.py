"""KV cache events on Model Runner V2; the long lane has the newest release on V1."""

from dataclasses import replace

import pytest

from harness import releases
from harness.engines.events import RUN, assert_same_events


@pytest.mark.parametrize(
    ("vllm", "runner"),
    [("0.28.0", "v1"), *((vllm, "v2") for vllm in releases.between("0.28"))],
)
def test_events_come_out_as_from_plain_vllm(engine, vllm, runner):
    run = replace(RUN, vllm=vllm, runner=runner)
    assert_same_events(engine(run), engine(replace(run, kvpatch=False)))
