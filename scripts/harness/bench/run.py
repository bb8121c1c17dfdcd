"""A run of both parts, its result file, and its goals on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

from harness import provenance
from harness.bench import arms, goals, two_models
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


class Bench:
    """A run of the benchmark, with its measurements so far."""

    def __init__(self, options: Options, screen: Screen) -> None:
        self._options = options
        self._screen = screen
        self._result: dict[str, Any] = {
            **provenance.header(options.command),
            "kind": options.kind,
            "size": asdict(options.size),
        }

    def run(self) -> int:
        """Measure the chosen parts."""
        for part in self._options.parts:
            # Servers of one part are gone before those of the next take their memory.
            with workspace() as folder:
                models = {
                    name: kept_model(seed, self._screen.say, KV_HEADS)
                    for name, seed in SEEDS.items()
                }
                starter = Starter(
                    models, folder, self._options.size, self._screen, self._options.logs
                )
                if part == "one":
                    chosen = self._chosen(arms.ALL, arms.DECIDING)
                    OneModel(chosen, starter, partial(self._save, "one_model")).measure()
                else:
                    pairs = self._chosen(two_models.ALL, two_models.DECIDING)
                    TwoModels(pairs, starter, partial(self._save, "two_models")).measure()
        for verdict in goals.verdicts(goals.Results(host=self._result)):
            self._screen.say(f"{verdict.word}: {verdict.goal}: {verdict.figure}")
        self._screen.say(f"written to {self._options.output}")
        return 0

    def _chosen(self, every: Sequence[Named], deciding: Sequence[Named]) -> tuple[Named, ...]:
        """Return the arms to run: in a quick run those that decide, unless they are named."""
        text = self._options.arms
        among = every if self._options.kind == "full" or text else deciding
        chosen = tuple(arm for arm in among if text in arm.name)
        if not chosen:
            raise HarnessError(f'no arm has "{text}" in its name')
        return chosen

    def _save(self, part: str, found: dict[str, Any]) -> None:
        """Write everything measured so far, for a run that is interrupted."""
        self._result[part] = found
        self._result["minutes"] = round(self._screen.seconds / 60, 1)
        provenance.write(self._result, self._options.output)
