"""KV cache events on Model Runner V2, and on both runners of the newest release."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.engines.events import RUN, assert_same_events
from harness.engines.runs import Finished, Run


@pytest.mark.parametrize(
    ("vllm", "runner"),
    [("", "v2"), *((f"0.{minor}.0", "v2") for minor in (29, 30, 31, 32)), ("0.32.0", "v1")],
)
def test_events_come_out_as_from_plain_vllm(
    engine: Callable[[Run], Finished], vllm: str, runner: str
) -> None:
    run = replace(RUN, vllm=vllm, runner=runner)
    assert_same_events(engine(run), engine(replace(run, kvpatch=False)))
