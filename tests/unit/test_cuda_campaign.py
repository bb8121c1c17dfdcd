"""What the runs on the emulated CUDA device put into their result file, beside each other."""

import json
from pathlib import Path

import pytest

from harness.cuda import campaign, device


def test_a_run_leaves_what_others_recorded(monkeypatch, tmp_path):
    result = tmp_path / "cuda.json"
    monkeypatch.setattr(campaign, "RESULT", result)
    before = {"releases": {"0.32.0": {"Multi": 1, "Offloading": 2}}, "served": {"0.26.0": {"a": 1}}}
    result.write_text(json.dumps({"command": "typed"} | before))
    campaign.record({"releases": {"0.32.0": {"Multi": 3}, "0.26.0": {"Multi": 4}}})
    campaign.record({"served": {"0.26.0": {"b": 2}}, "lines": {"C++": 5}})
    found = json.loads(result.read_text())
    assert found.pop("machine")["cpus"]
    assert found == {
        "command": "typed",
        "releases": {"0.32.0": {"Multi": 3, "Offloading": 2}, "0.26.0": {"Multi": 4}},
        "served": {"0.26.0": {"a": 1, "b": 2}},
        "lines": {"C++": 5},
    }


@pytest.mark.parametrize(
    ("change", "restores", "verdict"),
    [
        ({}, True, True),
        ({"restored tokens": 0}, True, False),
        ({"restored tokens": 0}, False, True),
        ({}, False, False),
        ({"restored tokens": 0, "wrong answers": 1}, False, False),
        ({"complaints": 1}, True, False),
        ({"of NVIDIA": ["libcudart.so.13"]}, True, False),
        ({"blocks": {"equal": 1, "close": 0, "wrong": 0, "unknown": 1}}, True, False),
        ({"ended": "a fault"}, True, False),
    ],
)
def test_an_engine_is_right_if_it_restores_what_it_is_to(change, restores, verdict):
    row = {
        **{"wrong answers": 0, "restored tokens": 9, "complaints": 0, "of NVIDIA": []},
        "blocks": {"equal": 1, "close": 1, "wrong": 0, "unknown": 0},
    }
    assert campaign.right(row | change, restores) is verdict


def test_the_lines_are_those_of_the_device_without_its_checks():
    for needed in ("httpx", "psutil"):
        pytest.importorskip(needed)
    from harness.cuda import served

    here = Path(device.__file__).parent
    longest = len((here / "operators.cpp").read_text().splitlines())
    assert longest < served.lines()["C++"] < 10 * longest
