"""scripts/bench instructions without valgrind: its paths, and what it calls a regression."""

import json

import pytest

pytest.importorskip("numpy")

from harness.bench import instructions


@pytest.mark.parametrize("name", instructions.PATHS)
def test_a_path_can_be_walked_again_and_again(name):
    walk = instructions.PATHS[name]()
    for _ in range(3):
        walk()


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.019, 0), (1.021, 1), (0.9, 0)])
def test_two_hundredths_more_are_a_regression(factor, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(instructions, "RESULT", tmp_path / "result.json")
    costs = dict.fromkeys(instructions.PATHS, 1000.0)
    monkeypatch.setattr(instructions, "counted", lambda path, times: int(5e6 + costs[path] * times))
    assert instructions.main([]) == 0
    assert set(json.loads(instructions.RESULT.read_text())["instructions"].values()) == {1000}
    costs["release"] *= factor
    assert instructions.main(["--check"]) == status
    assert f"release: {1000 * factor:,.0f}, {factor - 1:+.1%}" in capsys.readouterr().out
