"""The goals of the host pool, set before anything was measured, and what was found."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.bench.reports import word

Result = dict[str, Any]
Row = tuple[str, str, str, str]
OPEN = "not measured"


def rows(pool: Result) -> Iterator[Row]:
    """Yield the figure, the goal, what was measured and the verdict, of every goal."""
    yield _start(pool.get("start"))
    yield from _memory(pool.get("memory"))
    yield _wave(pool.get("wave"))
    yield from _load(pool.get("load"), "a load without pressure")
    yield from _load(pool.get("real"), "coding sessions of a real model")
    yield _share(pool.get("share"))
    yield _chaos(pool.get("chaos"))


def _start(found: Result | None) -> Row:
    figure = "start to ready against the tier's size, 1 to 16 GiB"
    goal = "at most 0.005 s per GiB"
    if found is None:
        return figure, goal, OPEN, "open"
    pool, own = found["per_gib"]["pool"], found["per_gib"]["own"]
    said = (
        f"{pool['seconds']:.3f} s per GiB, {pool['cpu_seconds']:.3f} s of the processor; without a "
        f"pool, to 4 GiB, {own['seconds']:.3f} s and {own['cpu_seconds']:.3f} s"
    )
    return figure, goal, said, word(pool["seconds"] <= 0.005)


def _memory(found: Result | None) -> Iterator[Row]:
    figure = "bytes committed over bytes of blocks, after a load, but for one extent"
    if found is None:
        yield figure, "at most 1.05", OPEN, "open"
    else:
        ratio = found["committed_over_resident"]
        said = f"{ratio['median']:.3f}, at most {ratio['most']:.3f}"
        yield figure, "at most 1.05", said, word(ratio["most"] <= 1.05)
    for name, key in (
        ("a reset", "seconds_after_a_reset"),
        ("a lowered limit", "seconds_after_a_lowered_limit"),
    ):
        figure = f"memory back after {name}, all but one extent"
        if found is None:
            yield figure, "within 1 s", OPEN, "open"
        else:
            took = found[key]
            said = f"{took['median']:.2f} s, at most {took['most']:.2f} s"
            yield figure, "within 1 s", said, word(took["most"] <= 1)


def _wave(found: Result | None) -> Row:
    figure = "memory back after an eviction wave, all but one extent"
    if found is None:
        return figure, "within 1 s", OPEN, "open"
    took, given = found["seconds_after_it_was_evicted"], found["given"] >> 20
    said = f"{took:.2f} s at most, of {given} MiB in {found['looks']} looks"
    return figure, "within 1 s", said, word(took <= 1 and given > 0)


def _load(found: Result | None, what: str) -> Iterator[Row]:
    goal = "within the noise of equal arms"
    for name, key in (("time", "seconds"), ("first token", "first_token")):
        figure = f"{name} of {what}, over that with vLLM's own tier"
        if found is None:
            yield figure, goal, OPEN, "open"
            continue
        ours, equal = found[key]["pool over own"], found[key]["own twice"]
        said = (
            f"{ours['median']:.3f}x ({ours['least']:.3f} to {ours['most']:.3f}); equal arms "
            f"{equal['median']:.3f}x ({equal['least']:.3f} to {equal['most']:.3f})"
        )
        within = ours["median"] <= equal["most"]  # faster is no miss
        yield figure, goal, said, word(within)
    part, goal = f"the keeper's part of the engine's processor time, {what}", "at most 1 %"
    if found is None:
        yield part, goal, OPEN, "open"
    else:
        share = found["keeper_share"]
        yield part, goal, f"{share:.2%}", word(share <= 0.01)


def _share(found: Result | None) -> Row:
    figure = (
        "coding and chat in turns: tokens served from the tier, one pool over fixed halves, when "
        "memory is short; with more"
    )
    if found is None:
        return figure, "at least 1.2x", OPEN, "open"
    ratios = {name: one["ratio"] for name, one in found.items()}
    said = "; ".join(f"{name}: {ratio:.2f}x" for name, ratio in ratios.items())
    return figure, "at least 1.2x", said, word(next(iter(ratios.values())) >= 1.2)


def _chaos(found: Result | None) -> Row:
    figure = "the kernel's count over the pool's size in 1 h of random loads, limits and kill -9"
    if found is None:
        return figure, "0 bytes", OPEN, "open"
    over, minutes = found["bytes_over_the_size"], found["minutes"]
    said = (
        f"{over:,} bytes in {minutes:.0f} minutes: {found['rounds']} loads, {found['limits']} "
        f"limits, {found['kills']} kills, {found['looks']} looks"
    )
    if over == 0 and minutes < 60:
        return figure, "0 bytes", said, "open: shorter"
    return figure, "0 bytes", said, word(over == 0)
