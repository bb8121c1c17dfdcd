"""The tiers' rules that need no vLLM: when a tier is late, and what waits behind what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvpatch import connectors
from kvpatch.tiers.admission import around_build, around_matched_tokens
from kvpatch.tiers.lateness import PATIENCE, Unanswered, patience


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_tier_is_late_while_its_oldest_question_has_no_answer_in_time():
    clock = Clock()
    unanswered = Unanswered(10, clock)
    assert not unanswered.late
    unanswered.asked("a")
    clock.now = 9
    unanswered.asked("b")
    assert not unanswered.late
    clock.now = 10.5
    assert unanswered.late
    unanswered.answered("a")
    assert not unanswered.late
    clock.now = 19.5
    assert unanswered.late
    unanswered.answered("b")
    unanswered.answered("never asked")
    assert not unanswered.late


@pytest.mark.parametrize(("text", "seconds"), [("", 10), ("0.5", 0.5), ("30", 30)])
def test_patience_is_a_number_of_seconds(monkeypatch, text, seconds):
    monkeypatch.setenv(PATIENCE, text)
    assert patience() == seconds


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_other_patience_is_an_error(monkeypatch, text):
    monkeypatch.setenv(PATIENCE, text)
    with pytest.raises(ValueError, match=f'{PATIENCE}="{text}" is not a number of seconds'):
        patience()


def test_no_load_starts_behind_a_request_that_waits_until_the_next_step():
    planner = SimpleNamespace()

    def ask(tokens: int | None, loads: bool) -> Any:
        return around_matched_tokens(lambda: (tokens, loads), planner, (), {})

    assert ask(640, True) == (640, True)
    assert ask(None, False) == (None, False)
    assert ask(640, True) == (None, False)
    # What is computed holds memory only while it runs.
    assert ask(0, False) == (0, False)
    assert around_build(lambda: "meta", planner, (), {}) == "meta"
    assert ask(640, True) == (640, True)


def part(name: str, **attributes: Any) -> Any:
    return type(name, (), attributes)()


def test_the_planner_is_found_in_a_multi_connector():
    offloading = part("OffloadingConnector", connector_scheduler="planner")
    other = part("NixlConnector", connector_scheduler="another")
    assert connectors.planner(None) is None
    assert connectors.planner(offloading) == "planner"
    assert connectors.planner(other) is None
    multi = part("MultiConnector", _connectors=[other, offloading])
    assert connectors.planner(multi) == "planner"
    assert list(connectors.parts(multi)) == [other, offloading]
