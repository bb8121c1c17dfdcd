"""The two-minute cut of scripts/soak: everything that frees blocks, in debug mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.timeout(900)
def test_two_minutes_leave_nothing_wrong_and_nothing_behind(reported: Callable[..., Any]) -> None:
    synchronous, asynchronous = reported("harness.soak", "--minutes", "2")["runs"]
    assert (synchronous["asynchronous"], asynchronous["asynchronous"]) == (False, True)
    for run in (synchronous, asynchronous):
        assert run["wrong"] == []
        assert set(run["left"].values()) == {0}
        (checked,) = run["checked"]
        assert checked["stored"] > 0
        assert checked["loaded"] > 0
        assert run["fence"]["released"] > 0
        assert run["counts"]["neighbours"] > 0
        assert run["counts"]["holds"] > 0
