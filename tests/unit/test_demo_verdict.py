"""The demo's verdict: what makes it fail, without running it."""

from dataclasses import replace

import pytest

pytest.importorskip("httpx")
pytest.importorskip("tokenizers")

from harness.demo.__main__ import parse
from harness.demo.conversations import Answer
from harness.demo.verdict import Comparison, Held, compare, failures
from kvpatch.verify.child import reason


def answers(**changed):
    """Three answers; ``changed`` is changed in the second."""
    made = [Answer(1, turn, [1, 2], [7, 8, 9], [-0.5, -1.0, -1.5]) for turn in (1, 2, 3)]
    made[1] = replace(made[1], **changed)
    return made


ALIKE = Comparison(equal=9, total=9, answers_equal=3, answers=3)
HALF = 6 << 20
GOOD = Held(
    counted={"first_returns": {"from_tier": 64}},
    elastic=True,
    used=8 << 20,
    second_used=9 << 20,
    kept=2 << 20,
    idle=4 << 20,
)


def test_equal_runs_are_equal():
    assert compare(answers(), answers()) == Comparison(9, 9, 3, 3, "", 0.0)


@pytest.mark.parametrize(
    ("change", "equal", "sentence"),
    [
        ({"tokens": [7, 0, 9]}, 8, "conversation 1, turn 2: token 2 of 3 differs"),
        ({"tokens": [7, 8]}, 8, "conversation 1, turn 2: token 3 of 3 differs"),
        ({"tokens": [7, 8, 9, 9]}, 9, "conversation 1, turn 2: token 4 of 3 differs"),
        ({"prompt": [1, 3]}, 9, "conversation 1, turn 2: the prompts differ"),
    ],
    ids=["a token", "one too few", "one too many", "the prompt"],
)
def test_one_difference_fails_the_demo(change, equal, sentence):
    found = compare(answers(), answers(**change))
    assert (found.equal, found.total, found.answers_equal) == (equal, 9, 2)
    assert found.first_difference == sentence
    (failure,) = failures(found, GOOD, HALF)
    assert "differ" in failure and sentence in failure


def test_a_missing_answer_is_a_difference():
    found = compare(answers(), answers()[:2])
    assert (found.equal, found.total) == (6, 9)
    assert found.first_difference == "conversation 1, turn 3: no answer"


def test_log_probabilities_are_compared_where_tokens_are_equal():
    got = answers(tokens=[7, 0, 9], logprobs=[-0.5, -9.0, -1.75])
    assert compare(answers(), got).logprob_difference == 0.25


@pytest.mark.parametrize("model", ["used", "second_used"])
def test_the_peak_of_one_model_is_enough(model):
    assert failures(ALIKE, replace(GOOD, **{model: 1 << 20}), HALF) == []


def test_nothing_that_was_compared_is_a_failure():
    (sentence,) = failures(Comparison(), GOOD, HALF)
    assert "Nothing was compared" in sentence


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"counted": {"first_returns": {"from_tier": 0}}}, "CPU tier"),
        ({"elastic": False}, "KV on elastic memory: yes"),
        ({"used": 6 << 20, "second_used": 5 << 20}, "nothing was lent"),
        ({"kept": 6 << 20}, "it lent nothing"),
        ({"idle": 9 << 20}, "did not fall"),
    ],
)
def test_each_claim_that_does_not_hold_is_said(change, word):
    assert failures(ALIKE, GOOD, HALF) == []
    (sentence,) = failures(ALIKE, replace(GOOD, **change), HALF)
    assert word in sentence


def test_the_reason_of_a_dead_server_is_found():
    refusal = "kvpatch refuses to start vLLM: a, because b; c."
    assert reason(["x", f"ImportError: {refusal}", "RuntimeError: Engine failed"]) == refusal
    ended = "kvpatch ends the engine: a, because b; c. [KVP422]"
    assert reason(["x", f"kvpatch.refusal.Halted: {ended}", "RuntimeError: failed"]) == ended
    assert reason(["x", "  ValueError: bad size", "nanobind: leaked"]) == "ValueError: bad size"
    assert reason(["only this"]) == "only this"
    assert reason([]) == "it printed nothing"


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--report", "/dev/null/report"], "cannot be used as a folder"),
        (["--fast"], "unrecognized"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(arguments, word, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert word in capsys.readouterr().err
