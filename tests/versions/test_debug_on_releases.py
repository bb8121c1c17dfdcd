"""Debug mode on every validated release, with every connector: it checks, and finds nothing."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.version import Version

from harness.engines.fences import TOGETHER, Fences
from harness.engines.multi import INSIDE
from harness.engines.oracle import PLAIN, assert_same
from harness.engines.runs import Finished, Run
from harness.engines.tiers import APART, SMALL, assert_found, hits, on
from kvpatch.supported import validated
from kvpatch.versions import Span

Engine = Callable[[Run], Finished]
DEBUG = {"KVPATCH_DEBUG": "1"}
COUNT = 8  # prompts of 20 whole blocks; the device has room for less than 7 of them
ROUNDS = (str(COUNT),) * 2
RUNNER_V2 = Span("0.29", "0.32")
NO_LAZY_MODE = Span("0.29", "0.30")  # it loses copies there, and is refused
CONNECTORS = {
    "offloading": Span("0.16"),
    "eager": Span("0.19"),
    "lazy": Span("0.19"),
    "tiering": Span("0.24"),
    "both inside": Span("0.22"),
    "behind another": Span("0.22"),
}
EVERY = [
    pytest.param(vllm, name, id=f"{vllm}-{name}")
    for name, span in CONNECTORS.items()
    for vllm in validated(span)
    if name != "lazy" or Version(vllm) not in NO_LAZY_MODE
]


def of_release(vllm: str) -> Run:
    runner = "v2" if Version(vllm) in RUNNER_V2 else "v1"
    return Run(vllm=vllm, runner=runner, rounds=ROUNDS).within(DEBUG)


def plain(engine: Engine, vllm: str) -> Finished:
    """What plain vLLM of the release answers."""
    ours = of_release(vllm)
    return engine(replace(PLAIN, vllm=vllm, runner=ours.runner, rounds=ROUNDS))


def checked(finished: Finished) -> dict[str, int]:
    """What was checked in the one worker."""
    (counts,) = finished.result["checked"]
    return dict(counts)


def on_disk(disk: Path, vllm: str) -> Run:
    """A run with a disk behind a CPU tier that holds less than is asked for."""
    run = on(disk, vllm=vllm, runner=of_release(vllm).runner)
    return run.within(DEBUG)


@pytest.mark.parametrize(("vllm", "connector"), EVERY)
def test_two_rounds_are_verified(engine, tmp_path, vllm, connector):
    changes = {
        "offloading": {},
        "eager": {"simple": "eager"},
        "lazy": {"simple": "lazy"},
        "tiering": {"tiers": (str(tmp_path),)},
        # In lazy mode: what it has not stored comes from the other one.
        "both inside": {
            "simple": "lazy" if Version(vllm) not in NO_LAZY_MODE else "eager",
            "inside": ("SimpleCPUOffloadConnector", "OffloadingConnector"),
        },
        "behind another": {"inside": INSIDE},
    }[connector]
    ours = engine(replace(of_release(vllm), **changes))
    assert_same(ours, plain(engine, vllm))
    least = 1 if connector == "behind another" else 0.95
    assert sum(hits(ours.round(1))) >= least * COUNT * 640
    counts = checked(ours)
    assert counts["stored"] > 0
    assert counts["loaded"] > 0
    assert counts["unverified"] == 0


@pytest.mark.parametrize("vllm", validated(CONNECTORS["tiering"]))
def test_what_a_tier_promotes_is_counted_apart(engine, serve, tmp_path, vllm):
    """Device and CPU tier hold less than is asked for, so that all of it is promoted."""
    ended = serve(on_disk(tmp_path, vllm), times=2, engine=SMALL["llama"])
    expected = plain(engine, vllm)
    for time, found in enumerate((0, 640)):
        assert_found(ended, expected, found, time)
    counts = checked(ended)
    assert counts["stored"] > 0
    assert counts["unverified"] == APART * 20
    assert counts["loaded"] == 0


@pytest.mark.parametrize("vllm", ["0.24.0", "0.32.0"])
def test_with_two_ranks_each_worker_verifies_its_part(engine, serve, tmp_path, vllm):
    """The workers are processes of their own, and hear of promotions with the steps."""
    for found in (0, 640):
        ended = serve(on_disk(tmp_path, vllm), engine={"tensor_parallel_size": 2})
        assert_found(ended, plain(engine, vllm), found)
        for counts in ended.result["checked"]:
            assert counts["loaded"] == 0
            assert counts["unverified"] == found // 640 * APART * 20
        assert len(ended.result["checked"]) == 2


def assert_violation(ended: Finished, found: str, request: str) -> None:
    assert ended.code != 0
    assert re.search(
        rf"kvpatch KVPATCH_DEBUG: {found}: block \d+ of page \d+, job \d+, request {request}",
        ended.log,
    ), ended.log[-4000:]


@pytest.mark.parametrize("vllm", validated(CONNECTORS["offloading"]))
def test_the_fences_interleavings_are_verified(fences, vllm):
    fence = fences(Fences, vllm, of_release(vllm).runner)
    ended, result = fence.debug(*TOGETHER, may_hold=not fence.waits_at_rest)
    assert ended.code == 0, ended.log[-4000:]
    (counts,) = json.loads(result.read_text())["checked"]
    assert counts["stored"] > 300
    assert counts["loaded"] >= 40
    assert counts["unverified"] == 0


@pytest.mark.parametrize("vllm", validated(CONNECTORS["offloading"]))
def test_a_load_of_other_bytes_stops_the_engine(fences, vllm):
    fence = fences(Fences, vllm, of_release(vllm).runner)
    ended, _ = fence.debug("corrupt", may_hold=not fence.waits_at_rest)
    assert_violation(ended, "a load brought other bytes than were stored", "corrupt/a")


# Up to 0.20 vLLM keeps the blocks of a request until its stores have ended, and in 0.22 and
# 0.23 an engine at rest waits for its copies: nothing is unmapped under them there.
@pytest.mark.parametrize("vllm", validated(Span("0.24")))
@pytest.mark.parametrize(
    ("broken", "found"),
    [
        ({"blind": True}, "a page is unmapped under a transfer"),
        ({"revert": ["fence.release"]}, "a block changed before its store was launched"),
    ],
    ids=["a blind fence", "no fence"],
)
def test_an_unmapping_under_a_store_stops_the_engine(fences, vllm, broken, found):
    ended, _ = fences(Fences, vllm, of_release(vllm).runner).debug("finish", **broken)
    assert_violation(ended, found, "finish/a")
