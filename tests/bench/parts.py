"""The parts that are timed: in which sizes, and how a result file names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import pytest_benchmark  # noqa: F401

    TIMED = True
except ModuleNotFoundError:
    TIMED = False


def sizes(*many: int) -> tuple[int, ...]:
    """All sizes of a part, from small to large, or the smallest where nothing is timed."""
    return many if TIMED else many[:1]


class Part:
    """One part in one size, as a result file has it."""

    def __init__(self, benchmark: Any) -> None:
        self._benchmark = benchmark

    def __call__(
        self,
        name: str,
        many: int,
        of: str,
        call: Callable[..., Any],
        setup: Callable[[], tuple[Any, ...]] | None = None,
    ) -> Any:
        """Time ``call``; with ``setup``, on fresh arguments each time."""
        self._benchmark.extra_info.update({"name": name, "many": many, "of": of})
        if setup is None:
            return self._benchmark(call)
        return self._benchmark.pedantic(call, setup=lambda: (setup(), {}), rounds=30)
