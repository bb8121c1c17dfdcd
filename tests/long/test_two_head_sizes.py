"""Sliding-window and full attention with heads, and so pages, of two sizes, as in Gemma 4.

In kvcached's contiguous layout vLLM puts the layers of a group into ``UniformTypeKVCacheSpecs``; in
the other one a block of the smaller pages has twice the tokens.
"""

from dataclasses import replace

import pytest

from harness.engines.oracle import PLAIN, assert_same
from harness.engines.runs import Run

MODEL = "two sizes"


# Runner V2 with the layout in which a block's tokens differ by the group.
@pytest.mark.parametrize(
    ("contiguous", "runner"),
    [(True, "v1"), (False, "v1"), (False, "v2")],
    ids=["contiguous-v1", "non-contiguous-v1", "non-contiguous-v2"],
)
def test_tokens_and_bytes_are_those_of_plain_vllm(engine, contiguous, runner):
    plain = engine(replace(PLAIN, model=MODEL, runner=runner))
    ours = engine(Run(model=MODEL, runner=runner, contiguous=contiguous, asynchronous=True))
    assert_same(ours, plain)
    assert ours.result["async"]
    assert ours.result["returned"] > 0
    assert ours.result["changed"] == []
