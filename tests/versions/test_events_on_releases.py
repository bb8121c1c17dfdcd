"""KV cache events on Model Runner V2 and on the newest release."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from runs import Finished, Run
from test_events import STEADY, assert_same_events


@pytest.mark.parametrize(
    ("vllm", "runner"),
    [("", "v2"), ("0.30.0", "v2"), ("0.32.0", "v1"), ("0.32.0", "v2")],
    ids=["0.28.0-v2", "0.30.0-v2", "0.32.0-v1", "0.32.0-v2"],
)
def test_events_come_out_as_from_plain_vllm(
    engine: Callable[[Run], Finished], vllm: str, runner: str
) -> None:
    plain, ours = (
        engine(
            Run(
                vllm=vllm,
                runner=runner,
                kvpatch=kvpatch,
                events=True,
                cpu_blocks=200,
                environment=STEADY,
            )
        )
        for kvpatch in (False, True)
    )
    assert_same_events(ours, plain)
