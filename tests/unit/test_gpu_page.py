"""A result file of scripts/gpu run renders every page that speaks of GPUs, and no word by hand."""

import json
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")  # of .venv, for the pictures; scripts/pythons is without

from harness.gpu import page, run

ROOT = Path(__file__).parents[2]
GPU = "NVIDIA H100 80GB HBM3, 580.1"


def verdict(vllm, connector, word="right", **extra):
    combination = {
        "versions": {"vllm": vllm},
        "device": "cuda NVIDIA H100 80GB HBM3",
        "flags": {
            "kv_transfer_config.kv_connector": connector,
            "kv_transfer_config.kv_connector_extra_config": extra,
        },
    }
    return {"verdict": {"verdict": word, "combination": combination}}


def row(step, state="right", **facts):
    words = {"wrong": [], "missing": []}
    words |= {"wrong": {"wrong": ["2 of 3"]}, "not seen": {"missing": ["no time"]}}.get(state, {})
    return {
        "step": step,
        "asks": f"asks {step}",
        "state": state,
        "seconds": 9,
        **words,
        "facts": facts,
    }


TIMES = {"p50": 1.25, "p99": 2.5, "max": 9.75}
COPY = {
    "connector": "OffloadingConnector",
    "direction": "load",
    "gb_per_second": 50.0,
    "share_of_ceiling": 0.97,
    "block_bytes": 1 << 20,
}
ROWS = [
    row("probe", page_us={"map": TIMES}, granularity=2 << 20),
    row("offloading", **verdict("0.32.0", "OffloadingConnector")),
    row("simple", "wrong", **verdict("0.32.0", "SimpleCPUOffloadConnector", "wrong")),
    row(
        "first-tokens",
        "not seen",
        computed={"first": {"p50_ms": 1500}, "returning": {"p50_ms": 88}},
    ),
    row("copies", copies=[COPY]),
    row("release-2", **verdict("0.26.0", "OffloadingConnector")),
    row("release-3", "not seen", verdict={"verdict": "unfinished", "combination": {}}),
]


def result(rows=ROWS):
    head = {"date": "2026-12-01", "commit": "unknown", "machine": {"gpu": GPU, "python": "3.12.3"}}
    return json.loads(json.dumps(head | run.together(rows)))


def test_without_a_result_nothing_is_claimed():
    found = page.sections(None)
    assert "It has **not run on a GPU yet**" in found["README.md"]["gpu"]
    assert found["docs/on-a-gpu.md"]["gpu"] == "No GPU has run these tests.\n"
    assert page.on_gpus(None) == []


@pytest.fixture
def rendered(run, tmp_path):
    """Render the documentation with a result file; returns a page without its line breaks."""
    for name in ("kvpatch", "docs", "scripts", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "docs/results/gpu.json").write_text(json.dumps(result()))
    docs = partial(run, sys.executable, tmp_path / "scripts/docs", PYTHONPATH=tmp_path)
    done = docs()
    assert (done.code, done.err) == (0, "")
    assert docs("--check").code == 0

    def rendered(name):
        return " ".join((tmp_path / name).read_text().split())

    return rendered


def test_every_page_follows_from_the_result(rendered):
    readme, index = rendered("README.md"), rendered("docs/index.md")
    for text, to in ((readme, "docs/"), (index, "")):
        assert "not run on a GPU" not in text
        assert (
            f"It ran on one GPU ({GPU}) with vLLM 0.32.0, 0.26.0: 4 of 7 steps were right, "
            "**wrong**: simple, not seen: first-tokens, release-3 "
            f"([what it showed]({to}on-a-gpu.md#what-one-gpu-showed))."
        ) in text
    line = "on one NVIDIA H100 80GB HBM3 | validated (GPU) |"
    for text in (readme, rendered("docs/support.md")):
        assert f"| 0.32.0 {line} WRONG | not run | not run | not run |" in text
        assert f"| 0.26.0 {line} not run | not run | not run | not run |" in text
    assert "kvpatch has not been run on a GPU" not in rendered("docs/support.md")
    own = rendered("docs/on-a-gpu.md")
    assert "No GPU has run these tests, but one has run" in own
    assert f"{GPU}, on 2026-12-01, at commit unknown, with Python 3.12.3: | step |" in own
    assert "| probe | asks probe | right | 9 |" in own
    assert "- **simple**: 2 of 3 - first-tokens, not seen: no time" in own
    assert "| computed | 1,500.0 | 88.0 |" in own
    assert "| page_us | map | 1.25 | 2.5 | 9.75 |" in own
    numbers = rendered("docs/numbers.md")
    assert "| OffloadingConnector | load | 1,024 | 50.0 | 97.0% |" in numbers
    assert "no GPU machine was available" not in numbers


@pytest.mark.parametrize(
    ("connector", "extra", "name"),
    [
        ("OffloadingConnector", {}, "Offloading"),
        ("OffloadingConnector", {"spec_name": "TieringOffloadingSpec"}, "tiering fs"),
        ("SimpleCPUOffloadConnector", {"lazy_offload": False}, "Simple eager"),
        ("SimpleCPUOffloadConnector", {"lazy_offload": True}, "Simple lazy"),
    ],
)
def test_connectors_have_the_names_of_the_matrix(connector, extra, name):
    assert page.connector(verdict("0", connector, **extra)["verdict"]) == name
