"""The recorded runs: what they executed, and what a change of it asks for."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from harness import ROOT, provenance
from harness.console import HarnessError
from harness.evidence import ages, executed, of_run, units
from harness.matrix import record, recorded
from kvpatch import patches
from kvpatch.matrix.verdicts import Cell

CELL = Cell("0.32.0", "V2", "contiguous", "Offloading", "full attention")
AXES = {name: getattr(CELL, name) for name in ("runner", "layout", "connector", "model")}


@pytest.fixture(autouse=True)
def nothing_remembered():
    recorded.forget()
    yield
    recorded.forget()


def test_every_process_of_a_run_writes_each_function_at_its_first_call(tmp_path):
    """In the process that starts, in its threads, in a fork, and in a Python that it starts."""
    code = """
import os, subprocess, sys, threading
from kvpatch import sizes
threading.Thread(target=lambda: sizes.readable(1)).start()
if os.fork() == 0:
    from kvpatch import cgroup
    cgroup.limit("nowhere") if hasattr(cgroup, "limit") else None
    from kvpatch import environ
    environ.boolean("1")
    os.kill(os.getpid(), 9)
os.wait()
subprocess.run([sys.executable, "-c", "from kvpatch import environ; environ.seconds('1')"])
sizes.readable(2)
"""
    file = tmp_path / "executed"
    environment = {**os.environ, "KVPATCH": "0", "PYTHONPATH": str(ROOT / "scripts")}
    subprocess.run(
        [sys.executable, "-c", code], env=of_run.recording(file, environment), check=True
    )
    lines = file.read_text().splitlines()
    assert len(lines) == len(set(lines)) or lines.count(lines[0]) <= 2  # a process each
    found = units.Tree().executed(executed.read(file))
    called = {"kvpatch.sizes:readable", "kvpatch.environ:boolean", "kvpatch.environ:seconds"}
    assert called <= found
    assert "kvpatch.environ:duration" not in found
    # What they name is executed with them, and classes by an import alone are not.
    assert "kvpatch.environ:ON_VALUES" in found
    assert "kvpatch.environ:HOST_POOL" not in found


def test_a_process_that_is_not_asked_writes_nothing(monkeypatch):
    monkeypatch.delenv(executed.VARIABLE, raising=False)
    executed.start()
    assert sys.gettrace() is None or "harness" not in getattr(sys.gettrace(), "__module__", "")


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("/env/site-packages/kvpatch/patches/fence/fence.py", "kvpatch/patches/fence/fence.py"),
        ("/env/site-packages/kvpatch_startup.py", "kvpatch/startup/kvpatch_startup.py"),
        (str(ROOT / "kvpatch/sizes.py"), "kvpatch/sizes.py"),
        (str(ROOT / "scripts/harness/models.py"), "scripts/harness/models.py"),
        ("/env/site-packages/vllm/config.py", ""),
        ("<string>", ""),
    ],
)
def test_a_file_is_told_by_its_place_in_the_repository(file, source):
    assert executed.source_of(file) == source


SOURCE = '''
"""A module."""
from kvpatch import environ
from kvpatch.logs import log

LIMIT = 3


class Keeper:
    """Keeps."""

    step: int = 1

    def turn(self, count: int) -> int:
        """Turn."""
        log.info("turned %s", count)
        if count > LIMIT:
            raise ValueError(f"{count} is too much")
        return count + self.step


def ask() -> str:
    return environ.IDLE.read()


print("imported")
'''


def digests(text):
    return {name: unit.digest for name, unit in units.of_text("m", text).items()}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Turn."""', '"""Turns."""'),
        ('"turned %s"', '"has turned %s times"'),
        ('f"{count} is too much"', 'f"that is {count}, and too much"'),
        ("count: int) -> int:", "count: float) -> float:"),
        ("        if count", "        # Not too often.\n        if count"),
        ('print("imported")', 'print("was imported")'),
    ],
)
def test_words_change_no_unit(old, new):
    assert old in SOURCE
    assert digests(SOURCE.replace(old, new)) == digests(SOURCE)


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("LIMIT = 3", "LIMIT = 4", ["m:LIMIT"]),
        ("count > LIMIT", "count >= LIMIT", ["m:Keeper.turn"]),
        ("step: int = 1", "step: int = 2", ["m:Keeper"]),
        ("def ask", "def turn(self):\n        return 0\n\n\ndef ask", ["m:turn"]),
        ("    step:", "    def __eq__(self, other):\n        return True\n\n    step:", None),
        ("import environ\n", "import sizes as environ\n", ["m:ask"]),
        ('print("imported")', "log.setLevel(1)", ["m:<body>"]),
    ],
)
def test_code_changes_its_unit(old, new, changed):
    before, after = digests(SOURCE), digests(SOURCE.replace(old, new))
    found = [name for name in before | after if before.get(name) != after.get(name)]
    assert sorted(found) == (changed or ["m:Keeper", "m:Keeper.__eq__"])


def test_what_an_executed_function_names_is_executed_with_it(tmp_path):
    made = of_files(tmp_path, SOURCE)
    line = SOURCE[: SOURCE.index("    def turn")].count("\n") + 1
    found = made.executed([("kvpatch/m.py", line)])
    names = ("<body>", "Keeper", "Keeper.turn", "LIMIT")
    assert found == {f"kvpatch.m:{name}" for name in names}
    assert made.executed([("kvpatch/gone.py", 1)]) == set()


def of_files(folder, text):
    """A tree with one module, ``kvpatch.m``."""
    for name in ("kvpatch", "scripts/harness"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "kvpatch/m.py").write_text(text)
    return units.Tree(folder)


def of_modules(folder, **texts):
    """A tree of modules of kvpatch with these texts."""
    of_files(folder, "")
    for name, text in texts.items():
        (folder / f"kvpatch/{name}.py").write_text(text)
    return units.Tree(folder)


LOOK = "def look(x):\n    return x + STEP\n"
STEP = "STEP = 1\n"
MOVED = {"kvpatch.a:look", "kvpatch.by:by"}
BY = "from kvpatch.{} import look\n\ndef by():\n    return look(2)\n"


@pytest.mark.parametrize(
    ("after", "changed"),
    [
        # A function, what it names and what imports it: none has changed.
        ({"a": "", "b": STEP + LOOK, "by": BY.format("b")}, set()),
        # Only one of the two, which the other imports from now on.
        ({"a": STEP, "b": f"from kvpatch.a import STEP\n{LOOK}", "by": BY.format("b")}, set()),
        ({"a": f"from kvpatch.b import STEP\n{LOOK}", "b": STEP, "by": BY.format("a")}, set()),
        # What it was called by, into its module.
        ({"a": STEP + LOOK + BY.partition("\n\n")[2], "by": ""}, set()),
        # Another function of that name, or the same one in two modules.
        ({"a": STEP, "b": f"from kvpatch.c import STEP\n{LOOK}", "by": BY.format("b")}, MOVED),
        ({"a": "", "b": STEP + LOOK.replace("+", "-"), "by": BY.format("b")}, MOVED),
        (
            {"a": "", "b": STEP + LOOK, "c": STEP + LOOK, "by": BY.format("b")},
            {*MOVED, "kvpatch.a:STEP"},
        ),
        # It moved, and what it names has another value.
        ({"a": "", "b": "STEP = 2\n" + LOOK, "by": BY.format("b")}, {*MOVED, "kvpatch.a:STEP"}),
    ],
)
def test_a_function_that_moved_to_another_module_is_the_same_one(tmp_path, after, changed):
    before = of_modules(tmp_path / "before", a=STEP + LOOK, by=BY.format("a"))
    then = {
        name: unit.digest
        for one in ("a", "by")
        for name, unit in before.of_module(f"kvpatch.{one}").items()
    }
    assert len(then) == 3
    one = ages.Ran(CELL, recorded.Run("engine", True, "a file", code(then)))
    tree = of_modules(tmp_path / "after", **after)
    found = ages.Evidence([one], ages.Today(tree, {}))
    assert found.changed(one) == changed


def test_a_method_that_changes_while_its_class_moves_is_wanted(tmp_path):
    before = of_modules(tmp_path / "before", a=SOURCE)
    then = {name: unit.digest for name, unit in before.of_module("kvpatch.a").items()}
    del then["kvpatch.a:<body>"]
    for text, changed in (
        (SOURCE, set()),
        (SOURCE.replace("count >", "count >="), {"kvpatch.b:Keeper.turn"}),
    ):
        tree = of_modules(tmp_path / f"after{len(text)}", b=text)
        one = ages.Ran(CELL, recorded.Run("engine", True, "a file", code(then)))
        found = ages.Evidence([one], ages.Today(tree, {}))
        assert found.changed(one) == changed
        assert {wanted.unit for wanted in found.wanted()} == changed


def code(executes):
    units = {"a list": [f"{name} {digest}" for name, digest in executes.items()]}
    return recorded.Code("abc", recorded.bits_of(units["a list"], units), units)


def ran(cell=CELL, right=True, level="engine", **executes):
    """A run that executed functions of ``kvpatch.m``, by name, with digests."""
    named = {f"kvpatch.m:{name}": digest for name, digest in executes.items()}
    return ages.Ran(cell, recorded.Run(level, right, "a file", code(named)))


def today(**there):
    """Code with these functions of ``kvpatch.m``."""
    return ages.Today(fixed={f"kvpatch.m:{name}": digest for name, digest in there.items()})


def test_a_set_of_units_is_read_as_it_was_written():
    for numbers in ([], [0], [3, 1, 700]):
        assert recorded.decode(recorded.encode(numbers)) == sorted(numbers)


def test_a_run_is_fresh_covered_or_old():
    one, other = ran(a="1", b="1"), ran(replace(CELL, layout="non-contiguous"), a="1")
    found = ages.Evidence([one, other], today(a="1", b="1"))
    assert (found.age(one), found.age(other)) == (ages.Age.FRESH, ages.Age.FRESH)
    # What the other never executed says nothing of it.
    found = ages.Evidence([one, other], today(a="1", b="2"))
    assert (found.age(one), found.age(other)) == (ages.Age.OLD, ages.Age.FRESH)
    # A fresh run with the same patches executed what changed.
    again = ran(replace(CELL, model="hybrid"), b="2")
    found = ages.Evidence([one, other, again], today(a="1", b="2"))
    assert found.age(one) is ages.Age.COVERED
    for no_help in (ran(right=False, b="2"), ran(b="1"), ran(level="synchronous", b="2")):
        found = ages.Evidence([one, no_help], today(a="1", b="2"))
        assert found.age(one) is ages.Age.OLD
    assert ages.Evidence([one, again], today(b="2")).age(one) is ages.Age.COVERED  # a went
    assert found.age(ran()) is ages.Age.OLD  # nothing was recorded of it
    assert found.counts()[ages.Age.OLD] == 1


def test_a_landing_needs_each_changed_unit_on_the_newest_and_the_oldest_release_that_executes_it():
    cells = [replace(CELL, vllm=vllm) for vllm in ("0.28.0", "0.30.0", "0.33.0")]
    runs = [ran(cell, a="1", b="1") for cell in cells]
    assert ages.Evidence(runs, today(a="1", b="1")).wanted() == set()
    found = ages.Evidence(runs, today(a="2", b="1"))
    changed = {ages.Wanted("kvpatch.m:a", vllm) for vllm in ("0.28.0", "0.33.0")}
    assert found.wanted() == changed
    assert [one.cell.vllm for one in found.landing()] == ["0.28.0", "0.33.0"]
    # Another run of a release shows it as well, and what did not change stays shown.
    shown = [ran(replace(cells[0], model="hybrid"), a="2"), ran(cells[2], a="2", b="1")]
    assert ages.Evidence([*runs[:2], *shown], today(a="2", b="1")).wanted() == set()
    wrong = ages.Ran(cells[2], replace(shown[1].run, right=False))
    found = ages.Evidence([*runs, shown[0], wrong], today(a="2", b="1"))
    assert found.wanted() == {ages.Wanted("kvpatch.m:a", "0.33.0")}
    assert ages.Evidence(runs, today()).wanted() == set()  # both are gone


def test_few_engines_cover_what_is_wanted():
    offers = {"one": "ab", "two": "bc", "all": "abc", "rest": "d"}
    assert ages.greedy(offers, "abcd") == ["all", "rest"]
    assert ages.greedy(offers, "abz") == ["one"]
    assert ages.greedy(offers, "") == []


def test_the_cover_of_a_tag_has_every_pair_of_values():
    cells = [
        replace(CELL, layout=layout, model=model, connector=connector)
        for layout in ("contiguous", "non-contiguous")
        for model in ("full attention", "hybrid")
        for connector in ("Offloading", "Multi")
    ]
    chosen = ages.pairs(cells)
    assert len(chosen) <= 5
    for axis, other in (("layout", "model"), ("layout", "connector"), ("model", "connector")):
        assert len({(getattr(one, axis), getattr(one, other)) for one in chosen}) == 4


def in_force(release):
    """The units of the patches that an engine of a release has today, without what is wanted."""
    rows = units.of_rows()
    names = [
        f"feature:{one.name}" for one, _ in patches.at(ages.Version(release)) if not one.wanted
    ]
    features = frozenset(name.removeprefix("feature:") for name in names)
    names += [f"row:{patch.id}" for patch in ages.rows_of(release, features)]
    return {name: rows[name] for name in names}


def test_a_row_that_came_makes_runs_of_its_feature_old():
    whole = in_force("0.32.0")
    without = {name: digest for name, digest in whole.items() if name != "row:fence.build"}
    one = ages.Ran(CELL, recorded.Run("engine", True, "a file", code(without)))
    found = ages.Evidence([one], ages.Today(fixed=units.of_rows()))
    assert found.changed(one) == {"row:fence.build"}
    assert found.wanted() == {ages.Wanted("row:fence.build", "0.32.0")}
    other = replace(CELL, model="hybrid")
    shown = ages.Ran(other, recorded.Run("engine", True, "a file", code(whole)))
    found = ages.Evidence([one, shown], ages.Today(fixed=units.of_rows()))
    assert (found.age(one), found.wanted()) == (ages.Age.COVERED, set())


def test_the_rows_of_tiers_say_nothing_of_a_run_without_them():
    whole = in_force("0.32.0")
    without = {
        name: digest for name, digest in whole.items() if name != "row:secondary_tiers.file_mapper"
    }
    for connector, changed in (
        ("Offloading", set()),
        ("tiering fs", {"row:secondary_tiers.file_mapper"}),
    ):
        cell = replace(CELL, connector=connector)
        one = ages.Ran(cell, recorded.Run("engine", True, "a file", code(without)))
        assert ages.Evidence([one], ages.Today(fixed=units.of_rows())).changed(one) == changed


FENCE = patches.FEATURES[[one.name for one in patches.FEATURES].index("fence")]


@pytest.fixture(scope="module")
def committed():
    """The recorded runs, and today's code."""
    recorded.forget()
    return ages.Evidence(ages.runs())


ON_311 = pytest.mark.skipif(
    sys.version_info[:2] != (3, 11), reason="a digest is of the syntax tree of Python 3.11"
)


@ON_311
def test_a_landing_lacks_no_run(committed):
    """Otherwise: commit, and scripts/matrix land."""
    assert sorted(committed.wanted()) == []


@pytest.fixture
def planted(committed):
    """The units that a landing wants on account of one change of a file."""

    def planted(file, old, new):
        text = (ROOT / file).read_text()
        assert old in text, f"{file} has another text"
        tree = committed.today.tree.changed(file, text.replace(old, new, 1))
        return lacking(committed, replace(committed.today, tree=tree))

    return planted


def lacking(committed, changed):
    """The units that a landing of changed code wants, beside those that it wants anyway."""
    before = {one.unit for one in committed.wanted()}
    return {one.unit for one in ages.Evidence(committed.ran, changed).wanted()} - before


@ON_311
@pytest.mark.parametrize(
    ("file", "old", "new", "unit"),
    [
        (
            "kvpatch/patch.py",
            "    setattr(parent, attribute, replacement)\n    return applied",
            "    return applied",
            "kvpatch.patch:apply",
        ),
        ("kvpatch/claims.py", "fcntl.LOCK_NB", "fcntl.LOCK_UN", "kvpatch.claims:take"),
        ("kvpatch/pool/keeper.py", "TICK = 0.1", "TICK = 9.9", "kvpatch.pool.keeper:TICK"),
        (
            "scripts/harness/matrix/cells.py",
            'return {"right": right, **record}',
            'return {"right": True, **record}',
            "harness.matrix.cells:judge",
        ),
        (
            "scripts/harness/engines/block_watch.py",
            "self.changed",
            "self.nothing",
            "harness.engines.block_watch:",
        ),
    ],
)
def test_a_change_that_a_run_stands_for_is_seen(planted, file, old, new, unit):
    assert any(one.startswith(unit) for one in planted(file, old, new))


@ON_311
@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("kvpatch/patches/fence/fence.py", '"""', '"""In other words: '),
        ("kvpatch/patches/elastic_memory/limit.py", '"kvpatch: the limit', '"the limit'),
        (
            "kvpatch/patches/elastic_memory/allocation.py",
            '"kvcached cannot manage this',
            '"kvcached does not manage this',
        ),
    ],
)
def test_words_are_seen_by_nothing(planted, file, old, new):
    assert planted(file, old, new) == set()


@pytest.mark.parametrize(
    "change", [{"target": "vllm.v1:other"}, {"wrapper": "kvpatch.patches.fence.hooks:other"}]
)
def test_a_row_with_another_target_or_function_is_seen(committed, change):
    (patch,) = [one for one in FENCE.patches if one.id == "fence.build"]
    row = f"row:{patch.id}"
    fixed = {**committed.today.fixed, row: units.of_row(patch._replace(**change))}
    assert lacking(committed, replace(committed.today, fixed=fixed)) == {row}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "DATA", tmp_path)
    monkeypatch.setattr(provenance, "commit", lambda: "0123456789ab")
    return tmp_path


HEAD = {"vllm": "0.32.0", "kvcached": "0.1.6"}


def test_a_run_names_its_commit_and_what_it_executed(folder):
    record.record_run("engine", HEAD, AXES | {"right": True}, {"kvpatch.m:a": "1", "row:r": "2"})
    ((cell, (run,)),) = recorded.runs(folder).items()
    assert (cell, run.level, run.right, run.code.commit) == (CELL, "engine", True, "0123456789ab")
    assert run.code.units == {"kvpatch.m:a": "1", "row:r": "2"}
    assert run.code.patches == {"r"}


def test_a_run_of_a_changed_tree_is_not_recorded(folder, monkeypatch):
    monkeypatch.setattr(provenance, "commit", lambda: f"abc{provenance.CHANGED}")
    with pytest.raises(HarnessError, match="commit first"):
        record.record_run("engine", HEAD, AXES | {"right": True}, {})
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("level", "feature", "place"),
    [
        ("engine", {}, "engine"),
        ("engine", {"feature": "fp8"}, "features"),
        ("engine", {"feature": "host pool"}, "tried"),
        ("engine", {"feature": "chunks + fp8"}, "tried"),
        ("synchronous", {"feature": "fp8"}, "synchronous"),
    ],
)
def test_a_feature_is_recorded_apart(folder, level, feature, place):
    for right in (False, True):
        record.record_run(level, HEAD, AXES | feature | {"right": right}, {"kvpatch.m:a": "1"})
    record.record_run(level, HEAD, AXES | {"model": "hybrid", "right": True}, {})
    path = folder / place / "vllm-0.32.0-kvcached-0.1.6.json"
    runs = json.loads(path.read_text())["runs"]
    mine = [run for run in runs if run["model"] == AXES["model"]]
    assert [(run.get("feature"), run["right"]) for run in mine] == [(feature.get("feature"), True)]


def execute(model, executes, vllm=CELL.vllm):
    """Record a run of a model that executed functions of ``kvpatch.m``."""
    executed_units = {f"kvpatch.m:{name}": "1" for name in executes}
    run = AXES | {"model": model, "right": True}
    record.record_run("engine", HEAD | {"vllm": vllm}, run, executed_units)


def executed_by_model(folder):
    recorded.forget()
    return {
        cell.model: "".join(name.rpartition(":")[2] for name in sorted(runs[0].code.units))
        for cell, runs in recorded.runs(folder).items()
    }


def test_units_that_no_run_executed_leave_their_lists(folder):
    execute("full attention", "zyx")
    execute("hybrid", "yb")
    execute("full attention", "b")
    assert sorted(map(len, recorded.lists(folder).values())) == [1, 3]
    record.tidy()
    assert list(recorded.lists(folder).values()) == [["kvpatch.m:b 1", "kvpatch.m:y 1"]]
    assert executed_by_model(folder) == {"full attention": "b", "hybrid": "by"}
    execute("hybrid", "b")
    execute("sliding window", "byc")
    execute("sliding window", "by")
    record.tidy()  # the list of c, which no run names any more
    assert list(recorded.lists(folder).values()) == [["kvpatch.m:b 1", "kvpatch.m:y 1"]]


def test_many_lists_become_one(folder, monkeypatch):
    monkeypatch.setattr(record, "MOST_LISTS", 2)
    for at, model in enumerate(("full attention", "hybrid", "sliding window")):
        record.tidy()
        assert len(recorded.lists(folder)) == at
        execute(model, "abc"[: at + 1])
    record.tidy()
    assert len(recorded.lists(folder)) == 1
    assert executed_by_model(folder) == {
        "full attention": "a",
        "hybrid": "ab",
        "sliding window": "abc",
    }


def edited(folder, edit):
    """Change the lists of units by hand, as a merge does."""
    path = folder / recorded.UNITS
    path.write_text(edit(path.read_text()))
    recorded.forget()


def test_what_two_checkouts_recorded_is_refused_if_a_merge_lost_it_and_repaired(folder):
    """Both added a list in one place, and the merge takes that of one side."""

    def git(*words):
        by = ("-c", "user.name=n", "-c", "user.email=e")
        subprocess.run(["git", "-C", str(folder), *by, *words], check=True, capture_output=True)

    def commit(branch, *run):
        git("checkout", "-q", "-B", branch)
        execute(*run)
        git("add", ".")
        git("commit", "-qm", branch)

    git("init", "-qb", "main")
    commit("main", "full attention", "abc")
    commit("one", "hybrid", "ax", "0.33.0")
    git("checkout", "-q", "main")
    commit("other", "sliding window", "by", "0.31.0")
    git("merge", "-q", "-X", "ours", "-m", "merge", "one")
    with pytest.raises(HarnessError, match="is gone: scripts/matrix repair"):
        executed_by_model(folder)
    whole = {"full attention": "abc", "hybrid": "ax", "sliding window": "by"}
    for edit in (str, "<<<<<<< ours\n{}".format):  # also with the marks of a conflict
        edited(folder, edit)
        assert record.repair() == []
        assert executed_by_model(folder) == whole


@pytest.mark.parametrize(("old", "new"), [("m:x 1", "m:z 1"), ('"kvpatch.m:a 1",', "")])
def test_a_list_of_units_that_a_merge_changed_is_refused(folder, old, new):
    execute("hybrid", "xa")
    edited(folder, lambda text: text.replace(old, new))
    with pytest.raises(HarnessError, match="was changed: scripts/matrix repair"):
        recorded.runs(folder)
    assert len(record.repair()) == 1  # no commit has it


def test_a_code_that_names_a_unit_twice_is_refused():
    units = {"a list": ["kvpatch.m:a 1", "kvpatch.m:a 2"]}
    twice = recorded.Code("abc", recorded.bits_of(units["a list"], units), units)
    with pytest.raises(HarnessError, match="names a unit twice"):
        _ = twice.units


def test_a_code_with_the_units_of_another_is_refused(folder):
    execute("hybrid", "ab")
    execute("full attention", "b")
    (path,) = folder.glob("engine/*.json")
    result = json.loads(path.read_text())
    one, other = result["code"].values()
    one["units"], other["units"] = other["units"], one["units"]
    record.write(path, result)
    ((run,), _) = recorded.runs(folder).values()
    with pytest.raises(HarnessError, match="are not those that it was recorded with"):
        _ = run.code.units
