"""The timer: pytest-benchmark where it is installed, else everything runs once, small.

``scripts/bench micro`` brings the plug-in; ``scripts/test bench`` only shows that the parts run.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from parts import TIMED, Part


class Once(SimpleNamespace):
    """In the place of pytest-benchmark's fixture: one call."""

    def __call__(self, call: Callable[..., Any]) -> Any:
        return call()

    def pedantic(self, call: Callable[..., Any], setup: Callable[[], Any], **_: Any) -> Any:
        arguments, _keywords = setup()
        return call(*arguments)


if not TIMED:

    @pytest.fixture
    def benchmark() -> Once:
        return Once(extra_info={})


@pytest.fixture
def part(benchmark: Any) -> Part:
    return Part(benchmark)
