"""fp8 KV caches beside what the matrix has: a sliding window, the other format, and scales.

A sliding window ran here only, and is refused: see KVP310.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from harness.engines.oracle import PLAIN, assert_same
from harness.engines.runs import Run, model_of
from harness.engines.tiers import APART, answers, assert_plain, hits, on

pytestmark = pytest.mark.skipif(
    "avx512f" not in Path("/proc/cpuinfo").read_text(),
    reason="vLLM's fp8 KV cache on a CPU requires AVX-512 or AMX, and this processor has neither",
)

# What a page of kvcached's holds of them, in one layer.
ONE_PAGE = {"num_gpu_blocks_override": 32}


# A window's groups in both layouts; the format and scales change bytes and no place.
@pytest.mark.parametrize(
    ("model", "dtype", "contiguous"),
    [
        ("sliding", "fp8", True),
        ("sliding", "fp8", False),
        ("llama", "fp8_e5m2", True),
        ("scaled", "", False),
    ],
)
def test_tokens_and_bytes_are_those_of_plain_vllm(engine, model, dtype, contiguous):
    plain = engine(replace(PLAIN, model=model, cache_dtype=dtype))
    forced = ("KVP310",) if model == "sliding" else ()
    ours = engine(
        Run(
            model=model,
            cache_dtype=dtype,
            contiguous=contiguous,
            asynchronous=True,
            forced=forced,
        )
    )
    assert_same(ours, plain)
    assert ours.result["returned"] > 0
    assert ours.result["changed"] == []
    assert "KV on elastic memory: yes" in ours.log


def test_scales_are_heard_in_the_tokens(engine):
    """Otherwise the test below would pass with the blocks of other scales."""
    one, other = (engine(replace(PLAIN, model=name)) for name in ("scaled", "scaled otherwise"))
    tokens = [[record["tokens"] for record in run.round(0)] for run in (one, other)]
    assert tokens[0] != tokens[1]


def test_a_disk_is_not_shared_with_a_checkpoint_of_other_scales(serve, engine, tmp_path):
    """In a folder of the same name, with the same weights."""
    disk, folder = tmp_path / "disk", tmp_path / "model"
    found = {}
    for name in ("scaled", "scaled otherwise", "scaled"):
        folder.unlink(missing_ok=True)
        folder.symlink_to(model_of(name))
        run = on(disk, model=name)
        records = answers(serve(run, model=str(folder), watch=True, engine=ONE_PAGE))
        assert_plain(records, engine(replace(PLAIN, model=name)))
        found.setdefault(name, []).append(hits(records))
    assert found == {
        "scaled": [[0] * APART, [640] * APART],
        "scaled otherwise": [[0] * APART],
    }
