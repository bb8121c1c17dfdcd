"""Blocks that must not be mixed up: salts, embeddings, images, replaced weights; CPU tier and disk.

What is asked in between leaves nothing of the first prompts on the device.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest

from harness import models
from harness.engines.oracle import PLAIN, same_tokens, widest_gap
from harness.engines.runs import Finished, Run, prompts
from harness.engines.tiers import SMALL, hits, on

TOKENS, *OTHERS = prompts(9)
FILL = [[prompt] for prompt in OTHERS]


def salted(*salts: str) -> list[list[Any]]:
    """The same tokens, each time with a salt; empty for none."""
    return [[TOKENS | ({"salt": salt} if salt else {})] for salt in salts]


def embedded(*seeds: int) -> list[list[Any]]:
    """Prompts of the same length, as embeddings."""
    return [[TOKENS | {"embeds": seed}] for seed in seeds]


def seen(*seeds: int) -> list[list[Any]]:
    """The same tokens behind an image, as long as the other prompts."""
    return [[TOKENS | {"tokens": TOKENS["tokens"][models.IMAGE :], "image": one}] for one in seeds]


@dataclass(frozen=True)
class Kind:
    """Three prompts of the same length that share no block.

    Attributes:
        made: makes prompts.
        of: what it makes them of.
        answers: how many different ones; a salt changes none.
        model: the kind of model.
        engine: arguments.
    """

    made: Callable[..., list[list[Any]]]
    of: tuple[Any, Any, Any]
    answers: int
    model: str = "llama"
    engine: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "salts": Kind(salted, ("a", "b", ""), answers=1),
    "embeddings": Kind(embedded, (1, 2, 3), answers=3, engine={"enable_prompt_embeds": True}),
    "images": Kind(seen, (1, 2, 3), answers=3, model="seeing"),
}


def records(finished: Finished) -> list[Any]:
    """The record of each prompt, in order."""
    finished.round(0)
    return list(itertools.chain.from_iterable(finished.result["rounds"]))


def assert_tokens(ours: list[Any], theirs: list[Any]) -> None:
    assert same_tokens(ours, theirs) == len(ours)
    assert widest_gap(ours, theirs) < 1e-4


@pytest.fixture(scope="module")
def plain(serve):
    """What plain vLLM answers to the three prompts of a kind, and to those in between."""

    @cache
    def of_model(model: str) -> dict[str, list[Any]]:
        kinds = {name: kind for name, kind in KINDS.items() if kind.model == model}
        rounds = [prompt for kind in kinds.values() for prompt in kind.made(*kind.of)]
        engine: dict[str, Any] = {}
        for kind in kinds.values():
            engine |= kind.engine
        run = replace(PLAIN, model=model)
        answers = records(serve(run, rounds=[*rounds, *FILL], engine=engine))
        assert hits(answers) == [0] * len(answers)
        fill = answers[len(rounds) :]
        return {name: answers[at * 3 : at * 3 + 3] + fill for at, name in enumerate(kinds)}

    def of(kind: str) -> list[Any]:
        answers = of_model(KINDS[kind].model)[kind]
        assert len({tuple(answer["tokens"]) for answer in answers[:3]}) == KINDS[kind].answers
        return answers

    return of


ASKED = [[TOKENS], *FILL[:2]]


@pytest.fixture(scope="module")
def old(plain):
    """What plain vLLM answers with the first weights; the third prompt has no salt."""
    return plain("salts")[2:5]


def assert_replaced(serve, run, trained, old, **reset):
    """With the weights replaced, and the caches reset, no block of the old ones is found."""
    reload = {"reload": [3], "reload_from": str(trained), **reset}
    ours = records(serve(run, rounds=ASKED * 3, **reload))
    new = records(serve(PLAIN, rounds=ASKED, model=str(trained)))
    assert same_tokens(old, new) == 0
    assert_tokens(ours[:3], old)
    assert_tokens(ours[3:6], new)
    assert_tokens(ours[6:], new)
    assert hits(ours[:6]) == [0] * 6


def test_weights_that_are_replaced_find_no_block_of_the_old_ones(serve, tmp_path, trained, old):
    """The loop of a training with reload_weights and a reset of all caches, over a disk."""
    assert_replaced(serve, on(tmp_path), trained, old)
    # The next engine of the old weights has all of theirs, and nothing of the new ones.
    again = records(serve(on(tmp_path), rounds=ASKED))
    assert_tokens(again, old)
    assert hits(again) == [640] * 3


def test_without_a_reset_nothing_of_the_new_weights_is_stored_as_of_the_old(
    serve, tmp_path, trained, old
):
    run = on(tmp_path)
    reload = {
        "rounds": [*ASKED[:1], *ASKED[1:]],
        "reload": [1],
        "reload_from": str(trained),
        "reset_on_reload": None,
    }
    ended = serve(run, **reload)
    records(ended)
    assert "secondary tiers are not used until the caches are reset" in ended.log
    again = records(serve(run, rounds=ASKED))
    assert_tokens(again, old)
    assert hits(again) == [640, 0, 0]


@pytest.mark.parametrize("run", [Run(), Run(simple="eager")], ids=["Offloading", "Simple"])
def test_a_reset_by_its_defaults_leaves_no_block_of_the_old_weights_in_the_cpu_tier(
    serve, trained, old, run
):
    """Without secondary tiers; vLLM resets the prefix cache of the device alone by default."""
    assert_replaced(serve, run, trained, old, reset_on_reload={})


@pytest.mark.parametrize("name", KINDS)
def test_a_disk_keeps_them_apart_over_a_restart(serve, tmp_path, plain, name):
    kind, expected = KINDS[name], plain(name)
    one, two, three = kind.of
    run = on(tmp_path, model=kind.model)
    stored = records(serve(run, rounds=kind.made(one, two), engine=kind.engine))
    assert hits(stored) == [0, 0]
    ours = records(serve(run, rounds=kind.made(three, two, one), engine=kind.engine))
    assert hits(ours) == [0, 640, 640]
    assert_tokens(stored + ours, expected[:2] + expected[:3][::-1])


# A disk is behind a CPU tier, which the test above asks of each kind: both have vLLM's hashes.
@pytest.mark.parametrize("name", ["salts"])
def test_the_cpu_tier_keeps_them_apart(serve, plain, name):
    kind, expected = KINDS[name], plain(name)
    (one, two, three), made = kind.of, kind.made
    # The device holds 4 of these prompts, the CPU tier all.
    rounds = [*made(one), *FILL, *made(two, three), *FILL, *made(one, two, three)]
    engine = kind.engine | SMALL["llama"]
    ours = records(serve(Run(model=kind.model), rounds=rounds, engine=engine, one_by_one=True))
    # All that comes back was asked before; nothing else has a block in common.
    assert hits(ours) == [0] * (1 + len(FILL) + 2) + [640] * (len(FILL) + 3)
    asked, fill = expected[:3], expected[3:]
    assert_tokens(ours, asked[:1] + fill + asked[1:] + fill + asked)
