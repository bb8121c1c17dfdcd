"""The same world as a state machine of hypothesis, which chooses and shrinks the operations."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from harness.simulate.play import OPERATIONS, perform
from harness.simulate.world import Mode, World


class Machine(RuleBasedStateMachine):
    """Drives a world; a violation fails the rule in which it shows."""

    model: ClassVar[str]
    folder: ClassVar[Path]
    kind: ClassVar[str | None]
    counts: ClassVar[Counter[str]]
    world: World | None = None

    @initialize(number=st.integers(0, 2**20))
    def start(self, number: int) -> None:
        """Start the engine of a seed."""
        self.world = World(number, Mode.of(number, self.kind), self.model, self.folder)

    def teardown(self) -> None:
        """Let everything end, and check what is left."""
        world, self.world = self.world, None
        if world is None:
            return
        try:
            if world.found is None:
                perform(world, "", 0)
        finally:
            self.counts.update(world.counts)
            self.counts["worlds"] += 1
            world.close()


def _rule(name: str) -> Any:
    def do(self: Any, number: int) -> None:
        self.counts["operations"] += 1
        perform(self.world, name, number)

    do.__name__ = name.replace(" ", "_")
    return rule(number=st.integers(0, OPERATIONS[name].top - 1))(do)


for _name in OPERATIONS:
    setattr(Machine, _name.replace(" ", "_"), _rule(_name))


def explore(
    number: int, examples: int, operations: int, model: str, folder: Path, kind: str | None
) -> dict[str, int]:
    """Let hypothesis play; a failure is raised with the operations that lead to it.

    Args:
        number: the seed of hypothesis: the same number, the same examples.
        examples: worlds at most.
        operations: of a world at most.
        model: the folder of a model, for its configuration.
        folder: for files.
        kind: of the connector; by the seed of each world if None.

    Returns:
        What happened, by name.
    """
    counts: Counter[str] = Counter()
    machine = type(
        "Simulated", (Machine,), {"model": model, "folder": folder, "kind": kind, "counts": counts}
    )
    run_state_machine_as_test(
        seed(number)(machine),
        settings=settings(
            deadline=None,
            database=None,
            max_examples=examples,
            stateful_step_count=operations,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        ),
    )
    return dict(counts)
