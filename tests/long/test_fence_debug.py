"""Debug mode on engines: it finds nothing, and each violation that is made."""

import json
import re

import pytest

from harness.engines.fences import TOGETHER


def test_debug_mode_checks_every_store_and_load_and_finds_nothing(fences):
    ended, result = fences().debug(*TOGETHER)
    assert ended.code == 0, ended.log[-4000:]
    (checked,) = json.loads(result.read_text())["checked"]
    assert checked["stored"] > 300
    assert checked["loaded"] >= 40


@pytest.mark.parametrize(
    ("scenario", "broken", "found"),
    [
        ("finish", {"blind": True}, "a page is unmapped under a transfer"),
        ("finish", {"revert": ["fence.release"]}, "a block changed before its store was launched"),
        ("corrupt", {}, "a load brought other bytes than were stored"),
    ],
)
def test_debug_mode_stops_the_engine_at_a_violation(fences, scenario, broken, found):
    ended, _ = fences().debug(scenario, **broken)
    assert ended.code != 0
    assert re.search(
        rf"kvpatch KVPATCH_DEBUG: {found}: block \d+ of page \d+, job \d+, request {scenario}/a",
        ended.log,
    ), ended.log[-4000:]
