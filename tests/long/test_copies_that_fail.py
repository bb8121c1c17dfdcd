"""Copies between the device and the CPU tier that fail, in an engine."""

import re
from dataclasses import replace
from typing import Any

import pytest

from harness.engines.failing_copies import BROKEN, REFUSED
from harness.engines.fixtures import MODES
from harness.engines.oracle import PLAIN, assert_same_round
from harness.engines.runs import Finished, Run, connector, load

ROUNDS = [load("few"), load("few"), load("few")]
# Blocks of the CPU tier, which has room for all prompts.
TIER = {"llama": 300, "sliding": 400}


def simple(mode: str, model: str = "llama") -> Run:
    return Run(model=model, simple=mode, cpu_blocks=TIER[model])


@pytest.fixture(scope="module")
def plain(serve):
    """What plain vLLM answers, by model."""
    return {
        model: serve(replace(PLAIN, model=model), rounds=ROUNDS[:1]).round(0)
        for model in ("llama", "sliding")
    }


def ends(finished: Finished) -> str:
    """The one sentence with which an engine ended."""
    assert finished.code != 0
    said = set(re.findall(r"^(?:\[rank0\]: )?(kvpatch ends the .*)$", finished.log, re.MULTILINE))
    assert len(said) == 1, finished.log[-4000:]
    (sentence,) = said
    assert sentence.endswith(" [KVP422]")
    return str(sentence)


@MODES
@pytest.mark.parametrize("model", ["llama", "sliding"])
@pytest.mark.fault(
    "a store of SimpleCPUOffloadConnector fails",
    "the CPU tier does not offer its blocks, and the engine goes on",
)
def test_what_was_not_stored_is_computed_again(serve, plain, mode, model):
    run = simple(mode, model=model)
    fail = {"connector": "Simple", "of": "stores", "times": 2}
    ours = serve(run, rounds=ROUNDS, fail=fail)
    for index in range(len(ROUNDS)):
        assert_same_round(ours.round(index), plain[model])
    assert ours.log.count(f"blocks failed with RuntimeError: {REFUSED}; the CPU tier does not") == 2
    assert ours.result["simple"]["changed"] == ours.result["simple"]["pinned"] == 0
    assert ours.result["simple"]["loaded"] > 0  # what was stored later


def by(policy: str) -> dict[str, Any]:
    """What an engine is given for what vLLM does when a load fails."""
    return {"kv_transfer_config": connector(simple("eager")) | {"kv_load_failure_policy": policy}}


LOADS = {"connector": "Simple", "of": "loads"}


@pytest.mark.fault(
    "a load of SimpleCPUOffloadConnector fails, for one KV cache group",
    "vLLM fails the requests or computes the blocks again, by `kv_load_failure_policy`",
)
def test_what_was_not_loaded_is_computed_again(serve, plain):
    ours = serve(simple("eager"), rounds=ROUNDS, fail=LOADS, engine=by("recompute"))
    for index in range(len(ROUNDS)):
        assert_same_round(ours.round(index), plain["llama"])
    assert "blocks failed with RuntimeError" in ours.log
    assert "Recovered from KV load failure: " in ours.log
    assert ours.result["simple"]["pinned"] == 0


def test_by_the_default_policy_its_requests_fail_and_no_others(serve, plain):
    ours = serve(simple("eager"), rounds=ROUNDS, fail=LOADS, engine=by("fail"))
    answered = [one["tokens"] for index in range(len(ROUNDS)) for one in ours.round(index)]
    expected = [one["tokens"] for one in plain["llama"]] * len(ROUNDS)
    failed = [index for index, tokens in enumerate(answered) if not tokens]
    assert failed
    assert [one for index, one in enumerate(answered) if index not in failed] == [
        one for index, one in enumerate(expected) if index not in failed
    ]
    assert ours.result["simple"]["pinned"] == 0


@pytest.mark.fault(
    "a load of SimpleCPUOffloadConnector fails, for several KV cache groups",
    "the engine ends with one sentence (KVP422)",
)
def test_a_failed_load_into_several_groups_ends_the_engine(serve):
    ended = serve(simple("eager", model="sliding"), rounds=ROUNDS, fail=LOADS)
    assert "vLLM cannot compute blocks of several KV cache groups again" in ends(ended)


@pytest.mark.fault(
    "more copies fail one after the other than are tolerated",
    "the engine ends with one sentence (KVP422); without it requests would wait for good",
)
def test_when_every_load_fails_the_engine_ends_instead_of_standing_still(serve):
    fail = LOADS | {"times": 1000}
    ended = serve(simple("eager"), rounds=ROUNDS, fail=fail, engine=by("recompute"))
    assert "and so did the 3 before it" in ends(ended)


@pytest.mark.parametrize("of", ["stores", "loads"])
@pytest.mark.fault(
    "a copy of OffloadingConnector fails on the device",
    "the engine ends with one sentence (KVP422); CUDA's errors stay",
)
def test_a_failed_copy_of_the_offloading_connector_ends_the_engine(serve, of):
    ended = serve(Run(), rounds=ROUNDS, fail={"connector": "Offloading", "of": of})
    assert f"the copies failed with RuntimeError: {BROKEN};" in ends(ended)
