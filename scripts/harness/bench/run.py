"""A run of both parts, and its result file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from harness import provenance
from harness.bench import arms, two_models
from harness.bench.one_model import OneModel
from harness.bench.options import Options
from harness.bench.sizes import KV_HEADS
from harness.bench.starting import Starter
from harness.bench.two_models import TwoModels
from harness.console import HarnessError, Screen
from harness.model_cache import kept_model
from harness.serve import workspace

SEEDS = {"a": 7, "b": 8}
Named = TypeVar("Named", arms.Arm, two_models.Shared)


def run(options: Options, screen: Screen) -> int:
    """Measure the chosen parts; what was measured so far is written all the time."""
    result: dict[str, Any] = {
        **provenance.header(options.command),
        "kind": options.kind,
        "size": asdict(options.size),
    }

    def save(part: str, found: dict[str, Any]) -> None:
        result[part] = found
        result["minutes"] = round(screen.seconds / 60, 1)
        provenance.write(result, options.output)

    for part in options.parts:
        # Servers of one part are gone before those of the next take their memory.
        with workspace() as folder:
            models = {name: kept_model(seed, screen.say, KV_HEADS) for name, seed in SEEDS.items()}
            starter = Starter(models, folder, options.size, screen, options.logs)
            if part == "one":
                own = chosen(options, arms.ALL)
                OneModel(own, starter, partial(save, "one_model")).measure()
            else:
                pairs = chosen(options, two_models.ALL)
                TwoModels(pairs, starter, partial(save, "two_models")).measure()
    screen.say(f"written to {options.output}")
    return 0


def chosen(options: Options, every: Sequence[Named]) -> list[Named]:
    """Return the arms to run."""
    found = [arm for arm in every if options.arms in arm.name]
    if not found:
        raise HarnessError(f'no arm has "{options.arms}" in its name')
    return found
