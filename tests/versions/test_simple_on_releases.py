"""SimpleCPUOffloadConnector on other releases and runners: the oracle, with less load."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.engines.fixtures import LAYOUTS, MODELS
from harness.engines.runs import Finished, Run

# FIXME from test_releases import COUNT
# FIXME from test_releases import ROUNDS as PLAIN_ROUNDS
# FIXME from test_simple import assert_same, served

# What the device cannot keep, the same again, and then more than the CPU tier can keep.
ROUNDS = (str(COUNT), str(COUNT), "12")
TIER = {"llama": 180, "sliding": 280}

# The release in .venv is "", which the engine lane runs on Runner V1.
RUNNERS = [
    *((vllm, "v1") for vllm in ("0.19.1", "0.22.1", "0.24.0")),
    ("", "v2"),
    ("0.30.0", "v2"),
    ("0.31.0", "v2"),
    ("0.32.0", "v2"),
    ("0.32.0", "v1"),
]
# vLLM 0.29 loses lazy copies and is refused.
EVERY = pytest.mark.parametrize(
    ("vllm", "runner", "mode"),
    [
        ("0.29.0", "v2", "eager"),
        *((*where, mode) for where, mode in itertools.product(RUNNERS, ("eager", "lazy"))),
    ],
)


# Up to 0.21 an engine with a connector keeps all blocks of a sliding window unless it is asked
# not to, and a block is that of all layers.
WINDOWS_ASKED_FOR = ("0.19.1",)


@EVERY
@MODELS
@LAYOUTS
def test_blocks_and_tokens_are_right(
    engine: Callable[[Run], Finished],
    vllm: str,
    runner: str,
    mode: str,
    model: str,
    contiguous: bool,
) -> None:
    base = Run(model=model, vllm=vllm, runner=runner, contiguous=contiguous)
    whole = model == "sliding" and vllm in WINDOWS_ASKED_FOR
    rows = TIER["llama" if whole else model]
    run = replace(base, simple=mode, cpu_blocks=rows * (1 + whole), rounds=ROUNDS)
    compare(engine, run, rows)


@pytest.mark.parametrize("vllm", WINDOWS_ASKED_FOR)
@LAYOUTS
def test_windows_that_were_asked_for_are_right_in_lazy_mode(
    engine: Callable[[Run], Finished], vllm: str, contiguous: bool
) -> None:
    run = Run(
        model="sliding",
        vllm=vllm,
        contiguous=contiguous,
        simple="lazy",
        windows=True,
        cpu_blocks=TIER["sliding"],
        rounds=ROUNDS,
    )
    assert compare(engine, run, TIER["sliding"]).result["groups"] > 1


def compare(engine: Callable[[Run], Finished], run: Run, rows: int) -> Finished:
    """Run an engine with ``rows`` CPU blocks and compare it with plain vLLM's."""
    base = replace(run, simple="", cpu_blocks=Run.cpu_blocks, windows=False)
    plain = replace(base, kvpatch=False, offload=False, contiguous=True, rounds=PLAIN_ROUNDS)
    expected, ours = engine(plain).round(0), engine(run)
    for index in range(len(ROUNDS)):
        assert_same(ours.round(index)[:COUNT], expected)
    assert ours.result["runner"] == run.runner
    assert served(ours.round(0)) == 0
    assert served(ours.round(1)) >= (1 if run.simple == "eager" else 0.95) * COUNT * 640
    assert "KV on elastic memory: yes" in ours.log
    seen = ours.result["simple"]
    assert seen["loaded"] >= 0.95 * COUNT * 20
    assert seen["changed"] == 0
    assert seen["evicted"] > 0
    assert seen["twice"] == []
    assert seen["pinned"] == 0
    assert seen["device_calls"] == {}
    assert seen["managers"] == 1
    assert seen["tiers"] == dict.fromkeys(("scheduler", "worker", "memory"), rows)
    return ours
