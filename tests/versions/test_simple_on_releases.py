"""SimpleCPUOffloadConnector on other releases and runners: the oracle, with less load."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from proofs import Proves
from runs import Finished, Run
from test_releases import COUNT
from test_releases import ROUNDS as PLAIN_ROUNDS
from test_simple import assert_same, served
from test_tokens import LAYOUTS, MODELS

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


@EVERY
@MODELS
@LAYOUTS
def test_blocks_and_tokens_are_right(
    engine: Callable[[Run], Finished],
    proves: Proves,
    vllm: str,
    runner: str,
    mode: str,
    model: str,
    contiguous: bool,
) -> None:
    base = Run(model=model, vllm=vllm, runner=runner, contiguous=contiguous)
    run = replace(base, simple=mode, cpu_blocks=TIER[model], rounds=ROUNDS)
    proves(f"Simple {mode}", run)
    plain = replace(base, kvpatch=False, offload=False, contiguous=True, rounds=PLAIN_ROUNDS)
    expected, ours = engine(plain).round(0), engine(run)
    for index in range(len(ROUNDS)):
        assert_same(ours.round(index)[:COUNT], expected)
    assert ours.result["runner"] == runner
    assert served(ours.round(0)) == 0
    assert served(ours.round(1)) >= (1 if mode == "eager" else 0.95) * COUNT * 640
    assert "KV on elastic memory: yes" in ours.log
    seen = ours.result["simple"]
    assert seen["loaded"] >= 0.95 * COUNT * 20
    assert seen["changed"] == 0
    assert seen["evicted"] > 0
    assert seen["twice"] == []
    assert seen["pinned"] == 0
    assert seen["device_calls"] == {}
    assert seen["managers"] == 1
    assert seen["tiers"] == dict.fromkeys(("scheduler", "worker", "memory"), TIER[model])
