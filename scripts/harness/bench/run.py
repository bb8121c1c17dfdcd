"""A run of the chosen parts, and its result file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from harness.bench import arms, loads, one_model, reports, two_models
from harness.bench.options import PARTS, Options
from harness.bench.sizes import KV_HEADS
from harness.bench.starting import Starter
from harness.console import HarnessError, Screen
from harness.model_cache import kept_model
from harness.serve import workspace

SEEDS = {"a": 7, "b": 8}
Named = TypeVar("Named", arms.Arm, two_models.Shared)


def run(options: Options, screen: Screen) -> int:
    """Measure the chosen parts; what is measured is written after each of them."""
    parts = {key: partial(measured, name, options, screen) for name, key in PARTS.items()}
    only = [PARTS[name] for name in options.parts]
    reports.measure(options.command, parts, only, options.output, echo=False)
    screen.say(f"written to {options.output}")
    return 0


def measured(part: str, options: Options, screen: Screen) -> dict[str, Any]:
    """Return what was measured of a part; its servers are gone then."""
    begun = screen.seconds
    with workspace() as folder:
        models = {name: kept_model(seed, screen.say, KV_HEADS) for name, seed in SEEDS.items()}
        starter = Starter(models, folder, options.size, screen, options.logs)
        if part == "one":
            own = chosen(options, arms.ALL)
            found = one_model.measured(own, starter, loads.LOADS, part)
        elif part == "answers":
            own = chosen(options, arms.ANSWERING)
            found = one_model.measured(own, starter, loads.ANSWERS, part)
        else:
            found = two_models.measured(chosen(options, two_models.ALL), starter)
    minutes = round((screen.seconds - begun) / 60, 1)
    return found | {"size": asdict(options.size), "minutes": minutes}


def chosen(options: Options, every: Sequence[Named]) -> list[Named]:
    """Return the arms to run."""
    found = [arm for arm in every if options.arms in arm.name]
    if not found:
        raise HarnessError(f'no arm has "{options.arms}" in its name')
    return found
