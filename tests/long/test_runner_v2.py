"""Model Runner V2, vLLM's default on a GPU: the oracle; tests/versions has the releases."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import pytest

from harness.engines.oracle import PLAIN, assert_same
from harness.engines.runs import BLOCK, Finished, Run

COUNT = 12  # prompts of 21 blocks on 139
ROUNDS = (str(COUNT),) * 2
V2 = Run(runner="v2", rounds=ROUNDS)


@pytest.mark.parametrize(
    ("model", "contiguous"),
    [("llama", True), ("llama", False), ("sliding", True)],
    ids=["llama-contiguous", "llama-non-contiguous", "sliding-contiguous"],
)
def test_prompts_served_from_the_cpu_tier_give_plain_vllms_tokens(
    engine: Callable[[Run], Finished], model: str, contiguous: bool
) -> None:
    plain = engine(replace(PLAIN, rounds=ROUNDS, runner="v2", model=model))
    ours = engine(replace(V2, model=model, contiguous=contiguous))
    assert_same(ours, plain)
    assert plain.result["runner"] == ours.result["runner"] == "v2"
    assert [record["cached"] for record in ours.round(1)] == [640] * COUNT
    assert ours.result["returned"] >= COUNT * 640 // BLOCK
    assert ours.result["changed"] == []
    assert "KV on elastic memory: yes" in ours.log


@pytest.mark.parametrize("asked", [True, False])
def test_triton_has_a_cpu_backend_only_where_the_interpreter_is_asked_for(asked: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if asked:
        environment["TRITON_INTERPRET"] = "1"
    code = "import sys, triton.backends as b; print('cpu' in b.backends, 'kvpatch' in sys.modules)"
    said = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert said.split() == [str(asked), "False"]
