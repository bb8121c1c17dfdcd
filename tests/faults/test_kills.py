"""Processes."""

import pytest

from harness.kills import LEFT


@pytest.mark.timeout(900)
@pytest.mark.fault(
    "kill -9 of the engine, a worker or the API server alone, in the middle of a store, a load, "
    "a promotion or a tier write (`python -m harness.kills`: 100 kills)",
    "the next server on the same disk serves plain vLLM's tokens, and nothing stays charged to the "
    "device; its start removes the CPU tier, the pool and the message queues of the dead from "
    "/dev/shm",
)
def test_servers_that_are_killed_leave_nothing_wrong_and_nothing_behind(reported):
    totals = reported("harness.kills", "--kills", "4")["totals"]
    assert totals["kills"] == 4
    assert totals["answers_of_successors"] > 0
    assert totals["tokens_from_tiers_of_successors"] > 0
    assert (totals["wrong_answers"], totals["charged_bytes"]) == (0, 0)
    assert set(totals["left_in_shm"]) <= set(LEFT)
