"""A CPU tier in a host pool, on the other releases that it is validated with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from harness import releases
from harness.engines.fixtures import MODELS
from harness.engines.oracle import PLAIN, Engine, assert_same_round
from harness.engines.pools import Pooled, is_gone, live, pool_of
from kvpatch.patches.host_pool import rules

OTHERS = tuple(one for one in rules.RELEASES if one != releases.newest_built())


@pytest.mark.parametrize("vllm", OTHERS)
@MODELS
def test_memory_is_committed_on_use_and_given_back(
    start_in_pool: Callable[..., Pooled], engine: Engine, model: str, vllm: str
) -> None:
    one = start_in_pool(replace(pool_of(256 << 20, "use"), model=model, vllm=vllm))
    plain = engine(replace(PLAIN, model=model, vllm=vllm)).round(0)
    for records in live(one, model):
        assert_same_round(records, plain)
    is_gone("use", one)
