"""scripts/new-vllm on stand-ins for what runs engines."""

import sys

import pytest

from harness import environments, new_vllm
from harness.matrix import kernels, moved, record, shapes, sharing, trial
from harness.new_vllm import Stage
from kvpatch import supported

RELEASE = "0.33.0"
REGISTRY = """RELEASES = {
    "0.31.0": VALIDATED,
    "0.32.0": VALIDATED,
    "0.34.0": INSPECTED_ONLY,
}
"""


@pytest.fixture
def standing_in(monkeypatch, tmp_path):
    """Run the command on commands that print and end; nothing is unpacked, made or recorded."""
    made = []
    monkeypatch.setattr(supported, "RELEASES", dict(supported.RELEASES))
    monkeypatch.setattr(environments, "BORROWED", dict(environments.BORROWED))
    tree = tmp_path / "tree"
    (tree / ".venv/bin").mkdir(parents=True)
    (tree / ".venv/bin/python").symlink_to(sys.executable)
    recorded = shapes.releases("vllm")[RELEASE]
    monkeypatch.setattr(record, "record_signatures", lambda *_: recorded)
    monkeypatch.setattr(environments, "made", made.append)
    monkeypatch.setattr(trial, "make", lambda *_: tree)
    monkeypatch.setattr(trial, "bring_back", lambda *_: [])

    def main(*groups, found=None, words=""):
        monkeypatch.setattr(moved, "between", lambda *_: found or moved.Moved())
        monkeypatch.setattr(new_vllm, "engine_stages", lambda *_: list(groups))
        command = ["new-vllm", RELEASE, "--as-unknown", "--work", str(tmp_path), *words.split()]
        monkeypatch.setattr(sys, "argv", command)
        return new_vllm.main()

    return main


def stage(name, code):
    return Stage(name, ("-c", code), f"by hand {name}")


def test_nothing_moved_and_all_passed_is_the_line(standing_in, capsys):
    assert standing_in([stage("cells", ""), stage("fence", "")]) == 0
    out = capsys.readouterr().out
    assert "Nothing moved: this is the line for RELEASES" in out
    assert '    "0.33.0": VALIDATED,\n' in out
    assert "scripts/docs" in out
    assert "in RELEASES: not there" in out
    assert '"0.33.0": "0.32.0"' in out  # it has no CPU build
    assert "by hand" not in out


def test_what_changed_is_to_be_read_before_the_line_is_written(standing_in, capsys, tmp_path):
    found = moved.Moved(functions=["patched, changed: vllm.a:b"], far=3, text="+ new")
    assert standing_in([stage("cells", "")], found=found) == new_vllm.READ
    out = capsys.readouterr().out
    assert "1 functions changed near a row:\n  patched, changed: vllm.a:b\n" in out
    assert "When that is read, this is the line" in out
    assert (tmp_path / "moved.diff").read_text() == "+ new"


def test_no_engine_starts_on_a_release_that_is_refused(standing_in, capsys):
    found = moved.Moved(rows=["fence.build: MOVED"])
    assert standing_in([stage("cells", "raise SystemExit(9)")], found=found) == new_vllm.READ
    out = capsys.readouterr().out
    assert "fence.build: MOVED" in out
    assert "scripts/environment 0.33.0\n  by hand cells" in out
    assert "this is the line" not in out


def test_a_failure_is_one_line_and_the_rest_is_left(standing_in, capsys):
    wrong = stage("kernels", "print('begun\\nFAILED a test\\nend'); raise SystemExit(4)")
    assert standing_in([wrong], [stage("cells", "")]) == new_vllm.FAILED
    out = capsys.readouterr().out
    assert "kernels FAILED: exit status 4: FAILED a test\n" in out
    assert "  by hand kernels\n  by hand cells\n" in out
    assert "cells: runs" not in out
    assert "this is the line" not in out


def test_stages_beside_each_other_all_run(standing_in, capsys):
    fails = stage("cells", "raise SystemExit(1)")
    assert standing_in([fails, stage("fence", "")], words="--jobs 1") == new_vllm.FAILED
    out = capsys.readouterr().out
    assert "fence: done" in out
    assert "cells FAILED: exit status 1: nothing was printed" in out


def test_without_an_environment_nothing_runs(standing_in, capsys, monkeypatch):
    def fails(_):
        raise SystemExit("environment: pip failed\nlong\nno such release")

    monkeypatch.setattr(environments, "made", fails)
    assert standing_in([stage("cells", "raise SystemExit(9)")]) == new_vllm.FAILED
    out = capsys.readouterr().out
    assert "environment FAILED: environment: pip failed: no such release\n" in out
    assert "  scripts/environment 0.33.0\n  by hand cells\n" in out


def test_sources_only_starts_nothing(standing_in, capsys):
    assert standing_in([stage("cells", "raise SystemExit(9)")], words="--sources-only") == 0
    assert "  scripts/environment 0.33.0\n  by hand cells\n" in capsys.readouterr().out


def test_known_cells_are_not_run_again_unless_they_are_unknown():
    ((cells, *_),) = new_vllm.engine_stages("0.32.0", "0.32.0", again=False)
    assert cells.command == ("scripts/matrix", "engine", "0.32.0", "--missing")
    ((cells, *_),) = new_vllm.engine_stages("0.32.0", "0.32.0", again=True)
    assert cells.command == ("scripts/matrix", "engine", "0.32.0")


def test_borrowed_libraries_are_compared_first():
    (first,), _ = new_vllm.engine_stages("0.33.0", "0.32.0", again=False)
    assert first.command == ("-m", "harness.matrix.kernels", "0.33.0", "0.32.0")


@pytest.mark.parametrize("shared", [True, False])
def test_the_fence_runs_unless_its_runs_are_shared(shared, monkeypatch):
    monkeypatch.setattr(sharing, "same", lambda *_: shared)
    (stages,) = new_vllm.engine_stages("0.31.5", "0.31.5", again=False)
    assert [one.name for one in stages] == (["cells"] if shared else ["cells", "fence"])
    # The newest has no later neighbour whose runs it could have.
    (stages,) = new_vllm.engine_stages("9.0.0", "9.0.0", again=False)
    assert [one.name for one in stages] == ["cells", "fence"]


def test_a_release_without_a_cpu_build_has_the_libraries_of_the_newest_before_it(monkeypatch):
    monkeypatch.setattr(environments, "BORROWED", {})
    known = shapes.releases("vllm")
    assert new_vllm.kernels_for(known["0.33.0"]) == "0.32.0"
    assert new_vllm.kernels_for(known["0.31.0"]) == "0.31.0"


@pytest.mark.parametrize("version", ["0.30.0", "0.32.0", "0.32.1", "0.34.0", "0.35.0"])
def test_the_registry_gets_the_line_in_its_place(version):
    found = {"VALIDATED": 1, "INSPECTED_ONLY": 0}
    exec(trial.with_line(REGISTRY, version), found)
    releases = found["RELEASES"]
    assert isinstance(releases, dict)
    assert list(releases) == sorted({"0.31.0", "0.32.0", "0.34.0", version})
    assert releases[version] == 1


def test_the_tree_is_the_checkout_with_the_line(tmp_path, monkeypatch):
    root = tmp_path / "checkout"
    for folder in ("docs/results/matrix/engine", "kvpatch", "scripts", "tests", ".venv"):
        (root / folder).mkdir(parents=True)
    (root / "pyproject.toml").touch()
    (root / trial.REGISTRY).write_text(REGISTRY)
    monkeypatch.setattr(trial, "ROOT", root)
    tree = trial.make("0.35.0", tmp_path / "tree")
    assert trial.line_of("0.35.0") in (tree / trial.REGISTRY).read_text()
    assert (root / trial.REGISTRY).read_text() == REGISTRY
    (tree / trial.ENVIRONMENTS / "0.35.0").mkdir()  # also where the checkout has made none yet
    assert (root / trial.ENVIRONMENTS / "0.35.0").is_dir()
    (tree / "docs/results/matrix/engine/vllm-0.35.0-kvcached-1.json").write_text("{}")
    (tree / "docs/results/matrix/engine/vllm-0.34.0-kvcached-1.json").write_text("{}")
    (back,) = trial.bring_back("0.35.0", tree)
    assert back == root / "docs/results/matrix/engine/vllm-0.35.0-kvcached-1.json"
    assert back.read_text() == "{}"


def test_answers_that_differ_are_counted():
    one = {"rounds": [[{"tokens": [1]}, {"tokens": [2]}]]}
    other = {"rounds": [[{"tokens": [1]}, {"tokens": [3]}]]}
    assert kernels.same(one, other) == (1, 2)
    assert kernels.same(one, {"failed": "so"}) == (0, 1)
