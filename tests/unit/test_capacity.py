"""A KV cache that does not fill kvcached's pages, or is larger than the device."""

import sys
from types import SimpleNamespace

import pytest
from fakes import module

from kvpatch.patches.elastic_memory import capacity, legacy
from kvpatch.refusal import Refusal
from kvpatch.upstream import kvcached_api
from kvpatch.upstream.kvcached_api import Blocks
from kvpatch.versions import Installed

PAGE = 2 << 20
BLOCK = 32 << 10  # 64 of them fill a page
POOLS = 6
TOKENS = 32  # of a block


class InternalPage:
    """kvcached's: the blocks that are in a page as a whole."""

    @staticmethod
    def get_block_range(page, page_size, block):
        return -(-page * page_size // block), (page + 1) * page_size // block


@pytest.fixture(autouse=True)
def kvcached(monkeypatch):
    """A kvcached whose pages hold 64 blocks of a model with six layers."""
    geometry = SimpleNamespace(page_bytes=BLOCK, num_pools=POOLS)
    monkeypatch.delitem(sys.modules, "kvcached", raising=False)
    module(monkeypatch, "kvcached.utils", PAGE_SIZE=PAGE)
    module(monkeypatch, "kvcached.kv_cache_manager", InternalPage=InternalPage)
    module(
        monkeypatch,
        "kvcached.integration.vllm.model_runner_v2",
        cache_geometry=lambda config: geometry,
    )


class Spec:
    """Full attention, or of a window, whose blocks are those of its tokens at the most."""

    block_size, page_size_bytes = TOKENS, 2 * BLOCK

    def __init__(self, window=0):
        self.window = window

    def max_memory_usage_bytes(self, config):
        tokens = config.model_config.max_model_len
        if self.window:
            tokens = min(tokens, self.window)
        return int(-(-tokens // self.block_size) * self.page_size_bytes)


def cache(blocks, *windows):
    groups = [SimpleNamespace(kv_cache_spec=Spec(window)) for window in (0, *windows)]
    return SimpleNamespace(num_blocks=blocks, kv_cache_groups=groups)


def engine(tokens, auto=False, override=None):
    """An ``EngineCore``; ``told`` has what it told its workers."""
    model = SimpleNamespace(max_model_len=tokens, original_max_model_len=-1 if auto else tokens)
    made = SimpleNamespace(
        vllm_config=SimpleNamespace(
            model_config=model, cache_config=SimpleNamespace(num_gpu_blocks_override=override)
        ),
        told=[],
    )
    made.collective_rpc = lambda method, args: made.told.append((method, args))
    return made


def start(core, found):
    config = object()

    def wrapped(given):
        assert given is config
        return found

    return capacity.around_kv_caches(wrapped, core, (config,), {})


@pytest.mark.parametrize(
    ("number", "size", "usable"),
    [
        (63, BLOCK, 0),
        (64, BLOCK, 64),
        (140, BLOCK, 128),
        (8, 3 << 18, 6),  # of three pages: two cross the end of one
        (8, 5 << 18, 4),  # of five pages, one of which has none
        (0, BLOCK, 0),
    ],
)
def test_only_blocks_of_whole_pages_are_usable(number, size, usable):
    assert Blocks(number, size, POOLS).usable == usable


@pytest.mark.parametrize(("usable", "number"), [(0, 0), (1, 64), (64, 64), (65, 128), (129, 192)])
def test_so_many_are_needed_for_use(usable, number):
    assert Blocks(1, BLOCK, POOLS).for_use(usable) == number
    assert Blocks(number, BLOCK, POOLS).usable >= usable


def test_a_kv_cache_that_holds_one_request_starts():
    core, found = engine(4064), cache(140)
    assert start(core, found) is found  # 127 blocks, and block 0
    assert core.vllm_config.model_config.max_model_len == 4064
    assert core.told == []


@pytest.mark.fault(
    "the KV cache is smaller than a page of kvcached",
    "the engine is refused with what to set (KVP425); it never started",
)
def test_a_kv_cache_smaller_than_a_page_is_refused():
    with pytest.raises(Refusal) as refused:
        start(engine(1024, override=40), cache(40))
    assert str(refused.value) == (
        "kvpatch refuses to start vLLM: the KV cache has 40 blocks, of which kvcached's whole "
        "pages hold none, and a request of 1024 tokens needs 33 with block 0, because kvcached "
        "maps no part of a page, and such a request would wait for ever; set "
        "--num-gpu-blocks-override 64 or more (12 MiB on each device). [KVP425]"
    )


@pytest.mark.fault(
    "a request of max_model_len needs blocks of a page that the KV cache does not fill",
    "the engine is refused with what to set (KVP425); the request waited for ever",
)
def test_a_request_that_needs_the_last_part_of_the_pool_is_refused():
    core = engine(4096)
    with pytest.raises(Refusal) as refused:
        start(core, cache(140))
    assert str(refused.value) == (
        "kvpatch refuses to start vLLM: the KV cache has 140 blocks, of which kvcached's whole "
        "pages hold 128, and a request of 4096 tokens needs 129 with block 0, because kvcached "
        "maps no part of a page, and such a request would wait for ever; set "
        "--kv-cache-memory-bytes 37748736 or more (36 MiB on each device, 192 blocks), or "
        "--max-model-len 4064 or less. [KVP425]"
    )
    assert core.vllm_config.model_config.max_model_len == 4096


def test_groups_add_up():
    start(engine(1024), cache(70, 32 * 31))  # 32 and 31 blocks, and block 0
    with pytest.raises(Refusal, match=r"needs 65 with block 0.*--max-model-len 992 or less"):
        start(engine(1024), cache(70, 32 * 32))


@pytest.mark.fault(
    "--max-model-len auto chooses a length that needs such blocks",
    "the length is lowered to what whole pages hold",
)
def test_a_length_that_vllm_chose_itself_is_lowered():
    core = engine(4448, auto=True)
    found = cache(140)
    assert start(core, found) is found
    assert core.vllm_config.model_config.max_model_len == 4064
    assert core.told == [("update_max_model_len", (4064,))]


def test_a_length_that_vllm_chose_itself_is_not_lowered_to_nothing():
    with pytest.raises(Refusal, match=r"hold none.*\[KVP425\]"):
        start(engine(1248, auto=True), cache(40))


def test_a_model_without_a_kv_cache_starts():
    found = SimpleNamespace(num_blocks=1, kv_cache_groups=[])
    assert start(engine(1024), found) is found


class Older:
    """kvcached's patches on vLLM before 0.29, for K and V that are apart."""

    @staticmethod
    def _get_first_attention_group(config):
        return next(iter(config.kv_cache_groups), None)

    @staticmethod
    def _infer_attention_type(config):
        return "MHA"

    @staticmethod
    def _get_kv_cache_params(spec, tokens, attention_type):
        assert attention_type == "MHA"
        return spec.page_size_bytes // tokens // 2, 2

    @staticmethod
    def _get_group_size(config):
        return POOLS


def release(monkeypatch, version):
    facts = SimpleNamespace(vllm=Installed.release("vllm", version))
    monkeypatch.setattr(legacy, "record", SimpleNamespace(facts=facts))


@pytest.fixture
def older(monkeypatch):
    release(monkeypatch, "0.20.0")
    module(monkeypatch, "kvcached.integration.vllm.patches")
    monkeypatch.setattr(sys.modules["kvcached.integration.vllm"], "patches", Older)

    def check(size, page):
        return None if size <= page else "larger than the page"

    module(monkeypatch, "kvcached.kv_geometry", check_page_geometry=check)


@pytest.mark.usefixtures("older")
def test_before_0_20_no_length_is_lowered_that_the_frontend_does_not_hear_of(monkeypatch):
    def begin():
        core = engine(4448, auto=True)
        legacy.around_kv_caches(lambda: cache(140), core, (), {})
        return core

    assert begin().told == [("update_max_model_len", (4064,))]
    release(monkeypatch, "0.19.1")
    with pytest.raises(Refusal, match=r"--max-model-len 4064 or less\. \[KVP425\]"):
        begin()


@pytest.mark.usefixtures("older")
@pytest.mark.parametrize("before_18", [True, False])
def test_before_0_29_too(before_18):
    def begin(tokens):
        found = (140, 0, cache(140)) if before_18 else cache(140)
        assert legacy.around_kv_caches(lambda: found, engine(tokens), (), {}) is found

    begin(4064)
    with pytest.raises(Refusal, match=r"hold 128.*72 MiB on each device.*\[KVP425\]"):
        begin(4096)


@pytest.mark.usefixtures("older")
def test_what_kvcached_cannot_have_before_0_29_it_says_itself(monkeypatch):
    none = SimpleNamespace(num_blocks=1, kv_cache_groups=[])
    assert kvcached_api.older_blocks_of(none) is None
    monkeypatch.setattr(Spec, "page_size_bytes", 4 * PAGE)
    large = cache(140)
    assert kvcached_api.older_blocks_of(large) is None
    assert legacy.around_kv_caches(lambda: large, engine(4096), (), {}) is large


def allocate(monkeypatch, blocks, device):
    properties = SimpleNamespace(total_memory=device)
    seen = SimpleNamespace(get_device_properties=lambda one: {"cuda:1": properties}[one])
    torch = SimpleNamespace(cuda=seen)
    module(monkeypatch, "kvcached.integration.vllm.interfaces", torch=torch)
    config = SimpleNamespace(num_blocks=blocks)
    return str(
        capacity.around_allocation(
            lambda config, device, layout: "caches", None, (config, "cuda:1", "layout"), {}
        )
    )


@pytest.mark.fault(
    "the KV cache is larger than the device",
    "the worker is refused with both sizes (KVP426), on the host device before the model loads "
    "(KVP505)",
)
def test_a_kv_cache_larger_than_the_device_is_refused(monkeypatch):
    assert allocate(monkeypatch, 128, 2 * POOLS * PAGE) == "caches"
    with pytest.raises(Refusal) as refused:
        allocate(monkeypatch, 129, 3 * POOLS * PAGE - 1)  # a page less in every layer
    assert str(refused.value) == (
        "kvpatch refuses to start vLLM: the KV cache of 24.2 MiB is larger than the device of "
        "36.0 MiB, because kvcached has addresses for the whole pages of the device only; set a "
        "smaller --num-gpu-blocks-override or --kv-cache-memory-bytes. [KVP426]"
    )
