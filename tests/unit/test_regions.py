"""Which memory a connector copies: the blocks of kvcached's pools, of validated kinds."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from test_region_memory import find, pool, torch  # noqa: F401

from kvpatch.patches.elastic_memory import lifting, regions
from kvpatch.patches.elastic_memory.regions import check_kinds
from kvpatch.refusal import VERIFY_IT, Refusal
from kvpatch.status import Record
from kvpatch.versions import Facts, Installed, Span


def plan(*specs):
    groups = [SimpleNamespace(kv_cache_spec=spec) for spec in specs]
    return SimpleNamespace(kv_cache_groups=groups)


def spec(kind, **fields):
    return type(kind, (SimpleNamespace,), {})(**fields)


def mamba(layers, mode):
    return spec("MambaSpec", mamba_type=SimpleNamespace(name=layers), mamba_cache_mode=mode)


def test_validated_kinds():
    check_kinds(plan(spec("FullAttentionSpec"), spec("SlidingWindowSpec")))
    check_kinds(plan(spec("MLAAttentionSpec")))
    check_kinds(plan(spec("FullAttentionSpec"), mamba("MAMBA2", "align")))
    check_kinds(plan(spec("FullAttentionSpec"), mamba("GDN_ATTN", "align")))


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (spec("ChunkedLocalAttentionSpec"), "ChunkedLocalAttentionSpec"),
        (mamba("MAMBA2", "all"), "MambaSpec of MAMBA2 layers in the mamba_cache_mode all"),
        (mamba("GDN_ATTN", "all"), "MambaSpec of GDN_ATTN layers in the mamba_cache_mode all"),
        (mamba("MAMBA1", "align"), "MambaSpec of MAMBA1 layers in the mamba_cache_mode align"),
    ],
)
def test_other_kinds(other, named):
    with pytest.raises(Refusal) as refused:
        check_kinds(plan(spec("FullAttentionSpec"), other))
    assert str(refused.value) == (
        f"kvpatch refuses to start vLLM: this model has a KV cache of kind {named}, because "
        "offloading it has not been validated by a store and load round trip; run it without a KV "
        f"connector, or with KVPATCH=0{VERIFY_IT}. [KVP406]"
    )


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "torch.float16", "torch.float32"])
def test_validated_dtypes(dtype):
    check_kinds(plan(spec("FullAttentionSpec", dtype=dtype), mamba("MAMBA2", "align")))


@pytest.mark.parametrize("dtype", ["torch.uint8", "torch.float8_e4m3fn", "torch.int8"])
def test_a_dtype_that_a_layer_has_by_itself(dtype):
    """The worker's layers have the last word; fp8 is bytes (uint8) in vLLM."""
    with pytest.raises(Refusal) as refused:
        check_kinds(plan(spec("FullAttentionSpec"), spec("SlidingWindowSpec", dtype=dtype)))
    assert str(refused.value) == (
        "kvpatch refuses to start vLLM: the layers of this model have KV caches of dtype "
        f"{dtype.removeprefix('torch.')}, because offloading them has not been validated by a "
        "store and load round trip; set --kv-cache-dtype bfloat16, or set "
        f"KVPATCH=0{VERIFY_IT}. [KVP418]"
    )


def quantized(dtype="uint8", kind="FullAttentionSpec", mode="FP8_PER_TENSOR"):
    return spec(kind, dtype=f"torch.{dtype}", kv_quant_mode=SimpleNamespace(name=mode))


@pytest.fixture
def release(monkeypatch):
    """Say which vLLM runs, where fp8 was compared from 0.28 on."""
    monkeypatch.setattr(regions.supported, "FP8", Span("0.28"))

    def release(version):
        kvcached = Installed.release("kvcached", "0.1.6")
        facts = version and Facts(Installed.release("vllm", version), kvcached, {})
        monkeypatch.setattr(regions, "record", Record(facts=facts or None))

    return release


@pytest.mark.parametrize(
    ("version", "layer", "starts"),
    [
        ("0.28.0", quantized(), True),
        ("0.28.0", quantized(mode="NONE"), True),
        ("0.28.0", spec("SlidingWindowSpec", dtype="torch.float8_e4m3fn"), True),
        ("0.28.0", quantized("float8_e5m2"), True),
        ("0.28.0", quantized(kind="MLAAttentionSpec"), False),  # other bytes are packed with it
        ("0.28.0", quantized(mode="NVFP4"), False),
        ("0.28.0", quantized("int8", mode="NONE"), False),
        ("0.27.1", quantized(), False),
        ("0.28.9", quantized(), False),  # no release that ran
        (None, quantized(), False),
    ],
)
def test_fp8_starts_where_it_was_compared(release, version, layer, starts):
    release(version)
    refused = nullcontext() if starts else pytest.raises(Refusal, match="KVP418")
    with refused:
        check_kinds(plan(spec("FullAttentionSpec"), layer))


def bytes_of(role="", **more):
    return spec(
        "MLAAttentionSpec", dtype="torch.uint8", cache_role=SimpleNamespace(name=role), **more
    )


@pytest.mark.parametrize(
    ("keys", "starts"),
    [
        (bytes_of("INDEXER"), True),
        (bytes_of("SPARSE", cache_dtype_str="fp8_ds_mla"), True),
        (bytes_of("SPARSE", cache_dtype_str="fp8"), False),
    ],
)
def test_sparse_attention_packs_bytes(keys, starts):
    refused = nullcontext() if starts else pytest.raises(Refusal, match="KVP418")
    with refused:
        check_kinds(plan(spec("MLAAttentionSpec"), keys))


@pytest.mark.parametrize("at", [0, 1])
def test_every_layer_of_a_group_counts(at):
    """vLLM groups layers of one type whose pages differ in size, with a spec for each."""
    layers = {name: spec("FullAttentionSpec") for name in "ab"}
    check_kinds(plan(spec("UniformTypeKVCacheSpecs", kv_cache_specs=layers)))
    layers["ab"[at]] = spec("ChunkedLocalAttentionSpec")
    with pytest.raises(Refusal, match="of kind ChunkedLocalAttentionSpec"):
        check_kinds(plan(spec("UniformTypeKVCacheSpecs", kv_cache_specs=layers)))


@pytest.mark.parametrize(
    "view", [None, pool(0x2000, rows=7)], ids=["not kvcached's", "7 of 8 blocks"]
)
def test_too_few_blocks(view):
    with pytest.raises(Refusal) as refused:
        find([["a", "b"]], a=pool(0x1000, rows=8), b=view)
    assert str(refused.value) == (
        "kvpatch refuses to start vLLM: the KV cache of b is not 8 blocks of kvcached's "
        "memory, because its blocks cannot be located in memory; report this with your command "
        "line, or set KVPATCH=0. [KVP405]"
    )


def test_a_kind_that_is_lifted_lifts_no_dtype(monkeypatch):
    monkeypatch.setattr(lifting, "lifts", lambda refusal: refusal.code == "KVP406")
    check_kinds(plan(spec("ChunkedLocalAttentionSpec")))
    with pytest.raises(Refusal, match="KVP418"):
        check_kinds(plan(spec("ChunkedLocalAttentionSpec", dtype="torch.uint8")))
