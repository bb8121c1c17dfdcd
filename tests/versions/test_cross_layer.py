"""What vLLM 0.28 and earlier register with OffloadingConnector: patched, and as vLLM does it."""

from dataclasses import replace

from harness.engines.fixtures import LAYOUTS
from harness.engines.oracle import PLAIN, assert_same, same_tokens
from harness.engines.runs import ALL, Run

RELEASE = "0.28.0"
OURS = Run(vllm=RELEASE)
PLAIN_THERE = replace(PLAIN, vllm=RELEASE)


def test_without_the_geometry_patch_the_tokens_are_wrong(engine):
    """The oracle can fail: this is what it reports on vLLM's own registration."""
    broken = engine(replace(OURS, revert=("offloading.register_kv_caches",)))
    assert same_tokens(broken.round(0), engine(PLAIN_THERE).round(0)) == ALL
    assert [record["cached"] for record in broken.round(1)] == [640] * ALL
    assert same_tokens(broken.round(1), engine(PLAIN_THERE).round(1)) == 0


@LAYOUTS
def test_a_backend_with_cross_layer_blocks_stays_on_elastic_memory(engine, contiguous):
    ours = engine(replace(OURS, cross_layer=True, contiguous=contiguous))
    assert_same(ours, engine(PLAIN_THERE))
    assert [record["cached"] for record in ours.round(1)] == [640] * ALL


def test_without_the_uniform_patch_vllm_does_not_start(engine):
    broken = engine(replace(OURS, cross_layer=True, revert=("offloading.use_uniform_kv_cache",)))
    assert broken.code != 0
    assert "Allocating a cross layer KV cache" in broken.log
    assert (
        "because it would stay allocated while kvcached maps a second, unused pool; "
        "report this with your command line, or set KVPATCH=0. [KVP402]\n" in broken.log
    )
