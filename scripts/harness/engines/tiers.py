"""Prompts that come back from a disk behind the CPU tier, one at a time."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.engines.oracle import same_tokens, widest_gap
from harness.engines.runs import Finished, Run
from kvpatch.environ import TIER_PATIENCE

Serve = Callable[..., Finished]

# So that another process finds the blocks by the same hashes.
SAME_HASHES = {"PYTHONHASHSEED": "0"}
# Nobody waits for a slow disk, but no machine that is busy makes a miss of a block.
PATIENT = {TIER_PATIENCE.name: "600"}
FEW = 60  # blocks of the CPU tier: three prompts
APART = 6  # prompts that are asked again, one at a time
# Room for four prompts; the second model needs blocks in both its groups for each.
SMALL = {
    model: {"num_gpu_blocks_override": blocks, "max_model_len": 1024}
    for model, blocks in {"llama": 96, "sliding": 132}.items()
}


def on(disk: Path | str, **more: Any) -> Run:
    return Run(tiers=(str(disk),), cpu_blocks=FEW, **more).within(SAME_HASHES | PATIENT)


def answers(finished: Finished, time: int = 0) -> list[Any]:
    """The records of the prompts that were run one at a time, of one of the times."""
    finished.round(0)
    return list(itertools.chain.from_iterable(finished.result["rounds"]))[
        time * APART : (time + 1) * APART
    ]


def hits(records: list[Any]) -> list[int]:
    return [record["cached"] for record in records]


def assert_found(finished: Finished, plain: Finished, tokens: int = 640, time: int = 0) -> None:
    """The prompts are answered as by plain vLLM, and so many tokens of each were not computed."""
    assert_plain(answers(finished, time), plain)
    assert hits(answers(finished, time)) == [tokens] * APART


def assert_comes_back(finished: Finished, plain: Finished) -> None:
    """The second time, prompts that device and CPU tier no longer have come from the disk."""
    assert_found(finished, plain, 0)
    assert_found(finished, plain, time=1)
    assert finished.result["evicted"] > 0
    assert finished.result["returned"] >= APART * 20
    assert finished.result["changed"] == []


def assert_plain(records: list[Any], plain: Finished) -> None:
    expected = plain.round(0)[:APART]
    assert same_tokens(records, expected) == APART
    assert widest_gap(records, expected) < 1e-4


# What happens to the disk, before and after the CPU tier is emptied, and what is then found.
FAULTS = {
    "truncated": ("nothing", "truncate", 0),
    "a bit changed": ("nothing", "flip", 0),
    "removed": ("nothing", "remove", 0),
    "full": ("nothing", "fill", 0),
    "with room again": ("nothing", "empty", 0),
    "filled again": ("nothing", "nothing", 640),
    "hanging": ("nothing", "hang", 0),
    "answering again": ("answer", "put_back", 640),
}
