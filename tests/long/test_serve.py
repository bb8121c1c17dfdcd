"""The same oracle over HTTP: ``vllm serve``, with one rank and with two.

One rank with contiguous tensors has Pythons of its own, as an operator's are on a CPU; the others
are forks, and one rank is in its engine's process, as on a GPU. test_killed.py has two ranks' own.
"""

from functools import cache

import pytest

from harness.engines.oracle import SMALL_TIER, assert_same
from harness.engines.runs import Finished, Run, prompts
from harness.engines.serving import watched

COUNT = 12


@pytest.fixture(scope="module")
def served(device, tmp_path_factory):
    """Serve a run; complete the prompts twice, one at a time."""

    @cache
    def serve(run: Run) -> Finished:
        result: dict = {"rounds": []}
        folder = tmp_path_factory.mktemp("serve")
        with watched(run, device, folder, fresh=run == Run()) as server:
            if run.offload:
                server.rpc("watch_transfers")
            for _ in range(2):
                result["rounds"].append([server.complete(p) for p in prompts(COUNT)])
            if run.offload:
                result["transfers"] = server.rpc("transfer_outcome")
            result["from_tier"] = server.metric("vllm:external_prefix_cache_hits_total")
        return Finished(0, server.log, result)

    return serve


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "non-contiguous"])
def test_served_prompts_come_back_from_the_tier_as_plain_vllm_computes_them(
    served, contiguous, ranks
):
    plain = served(Run(kvpatch=False, offload=False, ranks=ranks))
    ours = served(Run(contiguous=contiguous, ranks=ranks))
    assert_same(ours, plain)
    assert ours.result["from_tier"] == COUNT * 640
    assert len(ours.result["transfers"]) == ranks
    for rank in ours.result["transfers"]:
        assert rank["loaded"] == COUNT * 640 // 32
        assert rank["changed"] == 0
    assert ours.log.count("KV on elastic memory: yes") == 1  # of the engine, whatever it starts


@pytest.mark.parametrize("ranks", [1, 2])
def test_served_with_a_small_tier_it_evicts_and_stays_right(served, ranks):
    plain = served(Run(kvpatch=False, offload=False, ranks=ranks))
    ours = served(Run(cpu_blocks=SMALL_TIER * ranks, policy="arc", ranks=ranks))
    assert_same(ours, plain)
    for rank in ours.result["transfers"]:
        assert rank["stored"] > SMALL_TIER
        assert rank["changed"] == 0
