"""What the documentation says is there: commands, variables, series, tests, files, recipes."""

import importlib
import json
import re
import shlex
from pathlib import Path

import pytest
from test_rules import check, config

from kvpatch import cli, environ
from kvpatch.supported import validated
from kvpatch.telemetry import prometheus, series

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
DASHBOARD = ROOT / "docs/monitoring/grafana/dashboards/kvpatch.json"
ALERTS = ROOT / "docs/monitoring/alerts.yml"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (\S.*)$", re.MULTILINE)


def blocks(language):
    return [
        body
        for page in PAGES
        for found, body in FENCE.findall(page.read_text())
        if found == language
    ]


def commands():
    lines = [line for body in blocks("sh") for line in body.replace("\\\n", " ").splitlines()]
    lines += [line for page in PAGES for line in INDENTED.findall(page.read_text())]
    return [line for line in lines if "kvpatch" in line]


def words_of_ours(line):
    """The arguments that a line gives the ``kvpatch`` command, or None."""
    words = shlex.split(line.partition(" > ")[0], comments=True)
    if words[:1] == ["kvpatch"]:
        return words[1:]
    return words[3:] if words[:3] == ["python", "-m", "kvpatch"] else None


OURS = sorted({tuple(words) for line in commands() if (words := words_of_ours(line)) is not None})


def test_there_are_commands_to_try():
    assert {words[0] for words in OURS} >= {"doctor", "status"}


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_a_command_of_ours_is_understood(words, monkeypatch):
    asked = []
    for command in cli.COMMANDS:
        monkeypatch.setattr(
            importlib.import_module(command.module),
            "run",
            lambda options: asked.append(options) or 0,
        )
    assert cli.main(list(words)) == 0
    assert len(asked) == 1


@pytest.mark.parametrize("page", [*PAGES, DASHBOARD, ALERTS], ids=lambda page: page.name)
def test_names_exist(page):
    text = page.read_text()
    variables = {setting.name for setting in environ.OURS}
    assert set(re.findall(r"\bKVPATCH_[A-Z_]+\b", text)) <= variables
    names = {f"{prometheus.PREFIX}{one.name}_total" for one in series.COUNTERS}
    others = (*series.GAUGES, *series.HISTOGRAMS, series.INFO, series.FEATURE)
    names |= {f"{prometheus.PREFIX}{one.name}" for one in others}
    names |= {f"{prometheus.PREFIX}{one.name}_bucket" for one in series.HISTOGRAMS}
    assert set(re.findall(r"vllm:kvpatch_\w+", text)) <= names
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name
    # tests/v1 is vLLM's.
    for path in re.findall(r"`((?:kvpatch|scripts|tests(?!/v1/)|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


RELEASES = validated()
FIELDS = ("kv_connector", "kv_connector_extra_config")
# A connector's column in docs/support.md.
COLUMNS = {
    "OffloadingConnector": "Offloading",
    "SimpleCPUOffloadConnector": "Simple eager",
    "lazy": "Simple lazy",
    "tiers": "tiering fs",
    "MultiConnector": "Multi",
}


def starts_on(given):
    """The releases and runners on which the rules let a recipe start."""
    connector = {f"kv_transfer_config__{name}": given[name] for name in FIELDS}
    return {
        (release, runner)
        for release in RELEASES
        for runner in ("V1", "V2")
        if check(config(**connector, use_v2_model_runner=runner == "V2", machine__vllm=release))
        is None
    }


def columns(given):
    """A recipe's own column, and those of the connectors inside it."""
    extra = given["kv_connector_extra_config"]
    if extra.get("lazy_offload"):
        yield COLUMNS["lazy"]
    else:
        yield COLUMNS["tiers" if "secondary_tiers" in extra else given["kv_connector"]]
    for inside in extra.get("connectors", ()):
        yield from columns(inside)


@pytest.mark.parametrize("recipe", blocks("json"))
def test_a_recipe_starts_where_the_page_of_support_says_so(recipe):
    given = json.loads(recipe)
    table = (ROOT / "docs/support.md").read_text()
    names, *rows = re.findall(r"^\| ((?:vLLM \| Off|0\.).*) \|$", table, re.MULTILINE)
    said = {(release, runner) for release in RELEASES for runner in ("V1", "V2")}
    for column in columns(given):
        place = names.split(" | ").index(column)
        cells = {row.split(" | ")[0]: row.split(" | ")[place] for row in rows}
        said &= {
            (release, runner)
            for release in RELEASES
            for runner in re.findall(r"\bV[12]\b", cells[release].partition("refused")[0])
        }
    assert starts_on(given) == said != set()


def test_every_kind_of_recipe_is_there():
    recipes = (ROOT / "docs/recipes.md").read_text()
    found = {
        next(columns(json.loads(body))) for name, body in FENCE.findall(recipes) if name == "json"
    }
    assert found == set(COLUMNS.values())


def test_python_in_the_docs_compiles():
    assert blocks("python")
    for code in blocks("python"):
        compile(code, "docs", "exec")


def test_the_dashboard_has_its_panels_side_by_side():
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"]
