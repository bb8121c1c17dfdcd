"""The fence on other releases: the demonstrations of the engine lane."""

import pytest
from packaging.version import Version

from harness import releases
from harness.engines.fences import ALONE, BOTH_LOADED, LOST_WITHOUT, TOGETHER, Fences, assert_right
from harness.engines.fixtures import SCHEDULING
from kvpatch import supported

# The newest on Runner V1 is what the engine lane runs.
# The others share the runs of one of these, by scripts/harness/matrix/sharing.py.
RELEASES = tuple(
    (vllm, releases.runner_of(vllm)) for vllm in releases.with_own_runs(supported.FLOOR)
)
EVERY = pytest.mark.parametrize("scenario", [*TOGETHER, *ALONE, BOTH_LOADED])
ON = pytest.mark.parametrize(("vllm", "runner"), RELEASES)


@ON
@SCHEDULING
@EVERY
def test_with_the_fence_every_stored_block_is_right(fences, vllm, runner, scenario, asynchronous):
    result = fences(Fences, vllm, runner).run(scenario, asynchronous, fenced=True)
    assert_right(result, scenario)
    assert result["preemptions"] > 0 or scenario != "preempt"
    assert result["async"] is asynchronous
    assert result["counters"]["released"] > 0


@ON
def test_with_two_ranks_every_stored_block_is_right(fences, vllm, runner):
    result = fences(Fences, vllm, runner).run("finish", asynchronous=False, fenced=True, ranks=2)
    assert_right(result, "finish", 2 * 70)


# From 0.30 on the connector does not store what leaves a sliding window in the same step.
STORES_SKIPPED = ("0.28.0", "0.29.0")


@pytest.mark.parametrize(
    ("vllm", "runner", "scenario", "asynchronous"),
    [
        (vllm, runner, name, mode)
        for vllm, runner in RELEASES
        if Version(vllm) >= Version("0.28")
        for mode, names in LOST_WITHOUT.items()
        for name in sorted(names)
        if name != "window_skip" or vllm in STORES_SKIPPED
    ],
)
def test_without_the_fence_blocks_are_lost(fences, vllm, runner, scenario, asynchronous):
    result = fences(Fences, vllm, runner).run(scenario, asynchronous, fenced=False)
    assert result["scenarios"][scenario]["wrong"] > 0


@ON
def test_a_block_that_ends_with_a_token_never_computed_is_not_stored(fences, vllm, runner):
    result = fences(Fences, vllm, runner).run("last_token", asynchronous=False, fenced=True)
    assert assert_right(result, "last_token")["right"] == 40  # of 41 blocks


@pytest.mark.parametrize(
    ("vllm", "runner"), [one for one in RELEASES if one[0] in releases.between("0.26", "0.30")]
)
def test_without_the_patch_it_is(fences, vllm, runner):
    result = fences(Fences, vllm, runner).run_reverted("last_token", "offloading.last_token")
    verdict = result["scenarios"]["last_token"]
    assert (verdict["right"], verdict["wrong"]) == (40, 1)
