"""Blocks that must not be mixed up: salts, prompt embeddings, replaced weights; CPU tier and disk.

What is asked in between leaves nothing of the first prompts on the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import models
from harness.engines.oracle import PLAIN, same_tokens, widest_gap
from harness.engines.runs import Finished, Run, prompts
from harness.engines.tiers import SAME_HASHES, SMALL, Serve, hits, on

TOKENS, *OTHERS = prompts(9)
FILL = [[prompt] for prompt in OTHERS]
EMBEDS = {"enable_prompt_embeds": True}


def salted(*salts: str) -> list[list[Any]]:
    """The same tokens, each time with a salt; empty for none."""
    return [[TOKENS | ({"salt": salt} if salt else {})] for salt in salts]


def embedded(*seeds: int) -> list[list[Any]]:
    """Prompts of the same length, as embeddings."""
    return [[TOKENS | {"embeds": seed}] for seed in seeds]


def records(finished: Finished) -> list[Any]:
    """The record of each prompt, in order."""
    finished.round(0)
    return list(itertools.chain.from_iterable(finished.result["rounds"]))


def assert_tokens(ours: list[Any], theirs: list[Any]) -> None:
    assert same_tokens(ours, theirs) == len(ours)
    assert widest_gap(ours, theirs) < 1e-4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with other weights."""
    return models.make_model(tmp_path_factory.mktemp("trained") / "llama-4", seed=8)


ASKED = [[prompt] for prompt in prompts(3)]


def test_weights_that_are_replaced_find_no_block_of_the_old_ones(
    serve: Serve, tmp_path: Path, trained: Path
) -> None:
    """The loop of a training with reload_weights and a reset of all caches, over a disk."""
    reload = {"rounds": ASKED * 3, "reload": [3], "reload_from": str(trained)}
    ours = records(serve(on(tmp_path), **reload))
    old = records(serve(PLAIN, rounds=ASKED))
    new = records(serve(PLAIN, rounds=ASKED, model=str(trained)))
    assert same_tokens(old, new) == 0
    assert_tokens(ours[:3], old)
    assert_tokens(ours[3:6], new)
    assert_tokens(ours[6:], new)
    assert hits(ours[:6]) == [0] * 6
    # The next engine of the old weights has all of theirs, and nothing of the new ones.
    again = records(serve(on(tmp_path), rounds=ASKED))
    assert_tokens(again, old)
    assert hits(again) == [640] * 3


def test_without_a_reset_nothing_of_the_new_weights_is_stored_as_of_the_old(
    serve: Serve, tmp_path: Path, trained: Path
) -> None:
    run = replace(on(tmp_path), environment=(SAME_HASHES,))
    reload = {
        "rounds": [*ASKED[:1], *ASKED[1:]],
        "reload": [1],
        "reload_from": str(trained),
        "reset_on_reload": False,
    }
    ended = serve(run, **reload)
    records(ended)
    assert "secondary tiers are not used until the caches are reset" in ended.log
    again = records(serve(run, rounds=ASKED))
    assert_tokens(again, records(serve(PLAIN, rounds=ASKED)))
    assert hits(again) == [640, 0, 0]


KINDS: dict[str, tuple[Callable[..., Any], list[Any], dict[str, Any]]] = {
    "salts": (salted, ["a", "b", ""], {}),
    "embeddings": (embedded, [1, 2, 3], EMBEDS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_keeps_them_apart_over_a_restart(serve: Serve, tmp_path: Path, kind: str) -> None:
    made, (one, two, three), engine = KINDS[kind]
    stored = records(serve(on(tmp_path), engine=engine, rounds=made(one, two)))
    assert hits(stored) == [0, 0]
    job = {"rounds": made(three, two, one)}
    ours = records(serve(on(tmp_path), engine=engine, **job))
    assert hits(ours) == [0, 640, 640]
    assert_tokens(ours, records(serve(PLAIN, engine=engine, **job)))


@pytest.mark.parametrize("kind", KINDS)
def test_the_cpu_tier_keeps_them_apart(serve: Serve, kind: str) -> None:
    made, (one, two, three), engine = KINDS[kind]
    # The device holds 4 of these prompts, the CPU tier all.
    rounds = [*made(one), *FILL, *made(two), *made(three), *FILL, *made(one, two, three)]
    job = {"rounds": rounds, "one_by_one": True}
    ours = records(serve(Run(), engine=engine | SMALL["llama"], **job))
    last = len(FILL) * 2 + 3
    assert hits(ours)[: last - len(FILL)] == [0] * (last - len(FILL))
    assert hits(ours)[last:] == [640] * 3
    assert_tokens(ours, records(serve(PLAIN, engine=engine | SMALL["llama"], **job)))
