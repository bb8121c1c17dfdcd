"""The oracle of tests/engine/test_tokens.py for the other cache policy and another dtype."""

from harness.engines.fixtures import LAYOUTS
from harness.engines.oracle import PLAIN, SMALL_TIER, assert_same, same_tokens, widest_gap
from harness.engines.runs import ALL, Run


@LAYOUTS
def test_with_arc_a_cpu_tier_smaller_than_the_load_stays_right(engine, contiguous):
    ours = engine(Run(contiguous=contiguous, cpu_blocks=SMALL_TIER, policy="arc"))
    assert_same(ours, engine(PLAIN))
    assert ours.result["evicted"] > 0
    assert ours.result["changed"] == []


def test_in_bfloat16_elastic_memory_gives_the_tokens_of_static_memory(engine):
    """Compared with offloading from static memory, one request at a time: in bfloat16 what
    is computed together, as after a hit, changes the last digits."""
    static = engine(Run(kvpatch=False, dtype="bfloat16", together=1))
    ours = engine(Run(dtype="bfloat16", together=1))
    for index in range(2):
        assert same_tokens(ours.round(index), static.round(index)) == ALL
        assert widest_gap(ours.round(index), static.round(index)) == 0
    assert ours.result["changed"] == []
