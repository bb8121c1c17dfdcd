"""The alert rules, the dashboard, and the command that prints them."""

import json
import re
import shutil
from pathlib import Path

import pytest

from kvpatch import cli

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "docs/monitoring"
DASHBOARD = json.loads((MONITORING / "grafana/dashboards/kvpatch.json").read_text())
ALERTS = (MONITORING / "alerts.yml").read_text()
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is not installed (Debian's package prometheus has it)",
)


@needs_promtool
def test_every_alert_fires_on_what_it_is_for_and_not_on_a_healthy_engine(run):
    done = run("promtool", "test", "rules", MONITORING / "alerts-test.yml")
    assert done.code == 0, done.out + done.err


@needs_promtool
def test_prometheus_takes_the_configuration_with_its_rules(run):
    done = run("promtool", "check", "config", MONITORING / "prometheus.yml")
    assert done.code == 0, done.out + done.err
    assert "12 rules found" in done.out


@needs_promtool
@pytest.mark.parametrize("query", QUERIES)
def test_prometheus_parses_every_query_of_the_dashboard(run, tmp_path, query):
    expression = re.sub(r"\$__rate_interval", "5m", re.sub(r'"\$\w+"', '".*"', query))
    rules = {"groups": [{"name": "a", "rules": [{"record": "a", "expr": expression}]}]}
    (tmp_path / "rules.yml").write_text(json.dumps(rules))  # JSON is YAML
    done = run("promtool", "check", "rules", tmp_path / "rules.yml")
    assert done.code == 0, done.out + done.err


def test_every_alert_is_tested_and_explained():
    names = re.findall(r"- alert: (\w+)", ALERTS)
    tests = (MONITORING / "alerts-test.yml").read_text()
    page = (ROOT / "docs/watching.md").read_text()
    assert len(names) == 12
    for name in names:
        assert f"{{alertname: {name}, eval_time: 12h, exp_alerts: []}}" in tests
        assert f"alertname: {name}\n" in tests
        assert f"`{name}`" in page
    assert ALERTS.count("summary:") == ALERTS.count("action:") == len(names)


def test_every_query_is_of_the_chosen_engines():
    assert [one["name"] for one in DASHBOARD["templating"]["list"]] == [
        *("datasource", "namespace", "instance", "model")
    ]
    chosen = 'namespace=~"$namespace",instance=~"$instance",model_name=~"$model"'
    for query in QUERIES:
        selectors = re.findall(r"vllm:\w+(\{[^}]*\})?", query)
        assert selectors
        assert all(chosen in one for one in selectors), query


def test_it_answers_the_five_questions_with_thresholds():
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        "Is it on?",
        "Is it right?",
        "What does it give back?",
        "What does it cost?",
        "What is stuck?",
    ]
    stats = [panel for panel in PANELS if panel["type"] == "stat"]
    assert stats
    assert all(panel["fieldConfig"]["defaults"]["thresholds"]["steps"] for panel in stats)


def test_the_command_prints_the_dashboard(capsys):
    assert cli.main(["dashboard"]) == 0
    assert json.loads(capsys.readouterr().out) == DASHBOARD


def test_the_command_prints_the_alerts(capsys):
    assert cli.main(["dashboard", "--alerts"]) == 0
    assert capsys.readouterr().out == ALERTS


def test_the_wheel_has_both_files():
    from kvpatch.cli import dashboard

    project = (ROOT / "pyproject.toml").read_text()
    for name in (dashboard.DASHBOARD, dashboard.ALERTS):
        assert f'"docs/monitoring/{name}" = "kvpatch/cli/monitoring/{name}"\n' in project
