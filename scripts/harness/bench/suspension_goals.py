"""The goals of suspending and of limits by demand, set before anything was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.bench.reports import word

Result = dict[str, Any]
Row = tuple[str, str, str, str]
OPEN = "not measured"
STEPS = 2
BALANCE = "balance --lend '*'"  # as the documentation says for models that are busy in turns


def rows(found: Result) -> Iterator[Row]:
    """Yield the figure, the goal, what was measured and the verdict, of every goal."""
    yield from _suspend(found.get("suspend"))
    yield _gaps(found.get("gaps"))
    yield from _three(found.get("three"))


def _suspend(found: Result | None) -> Iterator[Row]:
    back = "pages back after a suspension, above the floor", "100 %"
    kept = "tokens on the device before it that are served after a resumption", "at least 95 %"
    time = "time of a suspension, whatever is on the device", f"copies and {STEPS} steps"
    if found is None:
        for figure, goal in (back, kept, time):
            yield figure, goal, OPEN, "open"
        return
    rounds = [one for kind in found.values() for one in kind["rounds"]]
    least = min(one["given_back"] for one in rounds)
    yield *back, f"{least:.0%} at least, of {len(rounds)} suspensions", word(least >= 1)
    served = min(one["served"] for one in rounds)
    wrong = sum(one["wrong_tokens"] for one in rounds)
    said = f"{served:.1%} at least; {wrong} answers with a wrong token"
    yield *kept, said, word(served >= 0.95 and wrong == 0)
    said = "; ".join(
        f"{kind}: {one['seconds_without_bytes'] * 1000:.0f} ms and "
        f"{one['seconds_per_gib']:.2f} s per GiB, a step {one['step_seconds'] * 1000:.1f} ms"
        for kind, one in found.items()
    )
    within = all(
        one["seconds_without_bytes"] <= STEPS * one["step_seconds"] for one in found.values()
    )
    yield *time, said, word(within)


def _gaps(found: Result | None) -> Row:
    figure = "coding sessions whose pages a neighbour has in their gaps: hits of what is possible"
    goal = "at least 95 %"
    if found is None:
        return figure, goal, OPEN, "open"
    gaps = found["gaps"]
    own = max(one["in_the_gap"] for one in gaps) >> 20
    theirs = min(one["neighbour"] for one in gaps) >> 20
    said = (
        f"{found['share']:.1%} of {found['ceiling']:,} tokens; {found['wrong_tokens']} wrong; in "
        f"{len(gaps)} gaps they keep {own} MiB and the neighbour has {theirs} MiB"
    )
    return figure, goal, said, word(found["share"] >= 0.95 and found["wrong_tokens"] == 0)


def _three(found: Result | None) -> Iterator[Row]:
    many = "three models in turns: tokens/s, balance over static thirds", "at least 1.5x"
    soon = "the same: P90 of the first token, balance over static thirds", "at most 0.5x"
    worst = "the same: the model that fares worst, tokens/s over its third", "at least 0.9x"
    if found is None:
        for figure, goal in (many, soon, worst):
            yield figure, goal, OPEN, "open"
        return
    thirds = found["static thirds"]
    rate, wait = (
        {arm: one[figure] / thirds[figure] for arm, one in found.items()}
        for figure in ("tokens_per_second", "first_token_p90")
    )
    yield *many, _ratios(rate), word(rate[BALANCE] >= 1.5)
    yield *soon, _ratios(wait), word(wait[BALANCE] <= 0.5)
    worst_of = {
        arm: min(
            one["tokens_per_second"] / third["tokens_per_second"]
            for one, third in zip(run["models"], thirds["models"], strict=True)
        )
        for arm, run in found.items()
    }
    yield *worst, _ratios(worst_of), word(worst_of[BALANCE] >= 0.9)


def _ratios(of: Result) -> str:
    """Return the ratio of the arm that is asked for, and the others beside it."""
    others = [f"{arm} {of[arm]:.2f}x" for arm in of if arm not in (BALANCE, "static thirds")]
    return f"{of[BALANCE]:.2f}x with `--lend '*'`; {', '.join(others)}"
