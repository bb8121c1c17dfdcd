"""Where a resumption can be killed: each point is passed on the way back, and only there."""

import pytest
from suspend_world import MOST, PAGE

from harness.engines import kill_points
from kvpatch.patches.suspend.hold import Hold
from kvpatch.patches.suspend.suspension import Suspension
from kvpatch.upstream import kvcached_api

# Phase, bytes of the limit in /dev/shm.
THERE = {
    "limit written": ("suspended", PAGE),
    "limit kept": ("resuming", MOST * PAGE),
    "requests run": ("resuming", MOST * PAGE),
    "runs": ("runs", MOST * PAGE),
}


@pytest.mark.parametrize("name", kill_points.BACK)
def test_a_resumption_passes_it_and_a_suspension_does_not(worlds, name, tmp_path, monkeypatch):
    for owner, attribute in (
        (Suspension, "_take_back"),
        (Suspension, "_go_to"),
        (Hold, "set"),
        (kvcached_api, "write_limit"),
        (kvcached_api, "is_applied"),
    ):
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))  # taken back at the end
    (tmp_path / "armed").touch()
    world = worlds()
    world.pool.cache(4, b"old4")
    stopped = []

    def stop(self):
        stopped.append((world.suspension.phase.value, world.manager.limit))

    monkeypatch.setattr(kill_points.Point, "stop", stop)
    kill_points.install(name, 1, tmp_path / "reached")
    world.suspension.suspend(False, False, None)
    world.until_idle()
    assert stopped == []
    world.suspension.resume()
    world.until_idle()
    assert stopped == [THERE[name]]
