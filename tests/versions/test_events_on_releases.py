"""KV cache events on Model Runner V2 and on the newest release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from runs import Finished, Run
from test_events import RUN, assert_same_events


@pytest.mark.parametrize(
    ("vllm", "runner"),
    [("", "v2"), ("0.30.0", "v2"), ("0.32.0", "v1"), ("0.32.0", "v2")],
    ids=["0.28.0-v2", "0.30.0-v2", "0.32.0-v1", "0.32.0-v2"],
)
def test_events_come_out_as_from_plain_vllm(
    engine: Callable[[Run], Finished], vllm: str, runner: str
) -> None:
    run = replace(RUN, vllm=vllm, runner=runner)
    assert_same_events(engine(run), engine(replace(run, kvpatch=False)))
