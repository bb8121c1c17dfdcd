"""Settings of vLLM's that change blocks or steps, each against plain vLLM: one prompt at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from harness import releases
from harness.engines.oracle import PLAIN, Engine
from harness.engines.runs import Run, engine_arguments
from harness.engines.tiers import APART, SMALL, Serve, answers, assert_plain, hits
from kvpatch import admitted

# Which of the matrix' features a setting is: before its cells ran the engine is refused.
CELLS = {
    "whole prompts": "whole prompts",
    "no hybrid manager": "no hybrid manager",
    "stored at the second use": "store threshold",
}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "blocks of 64": ("llama", {"block_size": 64, "num_gpu_blocks_override": 48}),
    "blocks of 128": ("llama", {"block_size": 128, "num_gpu_blocks_override": 24}),
    "whole prompts": ("llama", {"enable_chunked_prefill": False, **SMALL["llama"]}),
    "no hybrid manager": (
        "sliding",
        {"disable_hybrid_kv_cache_manager": True, **SMALL["llama"]},  # one group, as llama's
    ),
}


def starts(setting: str) -> Any:
    """A setting, which is skipped while it is refused."""
    feature = CELLS.get(setting)
    waits = bool(feature) and releases.newest_built() not in admitted.table().get(feature, {})
    return pytest.param(setting, marks=pytest.mark.skipif(waits, reason="its cells have not run"))


# Only the size of blocks changes how they lie, and the other settings are cells of the matrix.
@pytest.mark.parametrize(
    ("setting", "contiguous"),
    [
        pytest.param(*starts(setting).values, contiguous, marks=starts(setting).marks)
        for setting, (_, changes) in SETTINGS.items()
        for contiguous in (True, False)
        if contiguous or "block_size" in changes
    ],
)
def test_what_the_device_lost_comes_back_from_the_cpu_tier(
    serve: Serve, engine: Engine, setting: str, contiguous: bool
) -> None:
    model, changes = SETTINGS[setting]
    run = Run(model=model, contiguous=contiguous)
    ours = serve(run, times=2, watch=True, engine=changes)
    for time, found in enumerate(([0] * APART, [640] * APART)):
        assert hits(answers(ours, time)) == found
        assert_plain(answers(ours, time), engine(replace(PLAIN, model=model)))
    assert ours.result["returned"] >= APART * 640 // changes.get("block_size", 32)
    assert ours.result["changed"] == []
    assert "KV on elastic memory: yes" in ours.log


@pytest.mark.parametrize("setting", [starts("stored at the second use")])
def test_a_block_is_stored_when_it_was_used_often_enough(
    serve: Serve, engine: Engine, setting: str
) -> None:
    run = Run()
    transfer = engine_arguments(run)["kv_transfer_config"]
    transfer["kv_connector_extra_config"]["store_threshold"] = 2
    ours = serve(
        run, times=3, watch=True, engine={"kv_transfer_config": transfer, **SMALL["llama"]}
    )
    assert [hits(answers(ours, time)) for time in range(3)] == [
        [0] * APART,
        [0] * APART,
        [640] * APART,
    ]
    for time in range(3):
        assert_plain(answers(ours, time), engine(PLAIN))
    assert ours.result["changed"] == []
