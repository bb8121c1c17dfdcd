"""The figures of README.md and of docs/index.md are those of docs/numbers.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NUMBERS = (ROOT / "docs/numbers.md").read_text()
ARMS = {
    "plain vLLM, static halves": "plain vLLM, halves",
    "vLLM + offloading, static halves": "vLLM + offloading, halves",
    "kvcached alone": "kvcached alone",
    "kvcached + kvpatch": "kvcached + kvpatch",
}


def row(text: str, name: str) -> list[str]:
    (line,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", text, re.MULTILINE)
    return line.split(" | ")


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
@pytest.mark.parametrize("arm", ARMS)
def test_two_models(page, arm):
    measured = NUMBERS.partition("## Two models on one device")[2].partition("\n## ")[0]
    _, freed, hit, _, _, returning, *_ = row(measured, ARMS[arm])
    shown = row((ROOT / page).read_text(), arm)
    assert shown[:2] == [freed, hit]
    assert shown[2:] in ([], [f"{returning.split(' / ')[1]} ms"])


def test_kvcached_by_its_default():
    _, freed, hit, *_ = row(NUMBERS, "kvcached alone, keeps 16000 tokens")
    words = " ".join((ROOT / "README.md").read_text().split())
    assert f"16000 tokens, kvcached alone frees {freed} and serves {hit}." in words


def test_starting_up():
    measured = NUMBERS.partition("## The parts by themselves")[2]
    off = re.search(r"the stub adds\n([\d.]+ ms) ", measured)[1]
    on = re.search(r"kvpatch adds\n([\d.]+ ms) ", measured)[1]
    (shown,) = row(
        (ROOT / "README.md").read_text(),
        "start-up: disabled, and enabled with an import of vLLM and kvcached",
    )
    assert shown == f"{off}, {on}"
