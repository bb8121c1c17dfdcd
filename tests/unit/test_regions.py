"""Which kinds of KV caches a connector may copy: those that were compared."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvpatch.patches.elastic_memory.regions import check_kinds
from kvpatch.refusal import Refusal


def plan(*specs: object) -> SimpleNamespace:
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def spec(kind: str, **fields: object) -> object:
    return type(kind, (SimpleNamespace,), {})(**fields)


def mamba(layers: str, mode: str) -> object:
    return spec("MambaSpec", mamba_type=SimpleNamespace(name=layers), mamba_cache_mode=mode)


def test_what_was_compared():
    check_kinds(plan(spec("FullAttentionSpec"), spec("SlidingWindowSpec")))
    check_kinds(plan(spec("MLAAttentionSpec")))
    check_kinds(plan(spec("FullAttentionSpec"), mamba("MAMBA2", "align")))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (spec("ChunkedLocalAttentionSpec"), "ChunkedLocalAttentionSpec"),
        (mamba("MAMBA2", "all"), "MambaSpec of MAMBA2 layers in the mamba_cache_mode all"),
        (mamba("GDN_ATTN", "align"), "MambaSpec of GDN_ATTN layers in the mamba_cache_mode align"),
    ],
)
def test_what_was_not(other, named):
    with pytest.raises(Refusal) as refused:
        check_kinds(plan(spec("FullAttentionSpec"), other))
    assert str(refused.value) == (
        f"kvpatch refuses to start vLLM: this model has a KV cache of kind {named}, because "
        "offloading it from kvcached's memory was never compared with plain vLLM; run it without a "
        "KV connector, or with KVPATCH=0. [KVP406]"
    )
