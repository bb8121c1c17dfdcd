"""When an engine of a test is called stuck."""

import itertools

from harness.engines import patience


def test_neither_many_steps_nor_much_time_alone_are_standing_still(monkeypatch):
    clock = itertools.count(0.0, 0.5)
    monkeypatch.setattr(patience.time, "monotonic", lambda: next(clock))
    assert len(list(patience.steps(10))) == 10 + patience.PATIENCE / 0.5 - 1
    slow = itertools.count(0.0, 100.0)
    monkeypatch.setattr(patience.time, "monotonic", lambda: next(slow))
    assert len(list(patience.steps(10))) == 10
