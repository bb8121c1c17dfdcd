"""The bytes that an offloading connector copies, on tensors of plain Python."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from fakes import module

from kvpatch import state
from kvpatch.patches.elastic_memory.regions import find_regions
from kvpatch.patches.offloading import registration
from kvpatch.patches.offloading.registration import Rows
from kvpatch.refusal import Refusal
from kvpatch.upstream import vllm_api


@dataclass(frozen=True)
class Memory:
    """A tensor of bytes: where it begins, its shape and its strides."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str = "uint8"
    storage: int = 0

    @property
    def ndim(self):
        return len(self.shape)

    def data_ptr(self):
        return self.address

    def stride(self):
        return self.strides

    def view(self, dtype):
        return Memory(self.address, self.shape, self.strides, dtype)

    def untyped_storage(self):
        return SimpleNamespace(data_ptr=lambda: self.storage)

    def __getitem__(self, key):
        if isinstance(key, slice):
            rows = min(key.stop, self.shape[0])
            return Memory(self.address, (rows, *self.shape[1:]), self.strides)
        every, half = key
        assert every == slice(None)
        rows, _, width = self.shape
        step, between, one = self.strides
        return Memory(self.address + half * between, (rows, width), (step, one))


def pool(address, width=64, rows=12):
    return Memory(address, (rows, width), (width, 1))


def split(address, width=64, rows=12):
    """K and V of a block in the two halves of a pool."""
    return Memory(address, (rows, 2, width), (width, rows * width, 1))


def region(address, width=64, stride=None):
    return Memory(address, (8, width), (stride or width, 1), "int8")


@pytest.fixture(autouse=True)
def torch(monkeypatch):
    module(monkeypatch, "torch", int8="int8")


def find(groups, **views):
    caches = {name: SimpleNamespace(_kvcached_block_copy_view=view) for name, view in views.items()}
    return find_regions(caches, groups, num_blocks=8)


def test_every_layer_of_its_own_pool_is_a_region():
    found = find([["a", "b"], ["c"]], a=pool(0x1000), b=pool(0x2000), c=pool(0x3000, 32))
    assert found.tensors == [region(0x1000), region(0x2000), region(0x3000, 32)]
    assert found.groups == [[0, 1], [2]]
    assert found.block_bytes == 160


def test_both_halves_of_a_split_pool_are_regions():
    """K alone would be restored, with whatever V the block had before."""
    found = find([["a", "b"]], a=split(0x1000), b=split(0x9000))
    assert found.tensors == [
        region(0x1000),
        region(0x1000 + 12 * 64),
        region(0x9000),
        region(0x9000 + 12 * 64),
    ]
    assert found.groups == [[0, 1, 2, 3]]
    assert found.block_bytes == 256


def test_groups_share_the_regions_of_a_pool_that_they_share():
    found = find(
        [["a", "b", "c"], ["d", "e"]],
        a=split(0x1000),
        b=split(0x1000),
        c=pool(0x5000),
        d=pool(0x5000),
        e=split(0x1000),
    )
    assert len(found.tensors) == 3
    assert found.groups == [[0, 1, 2], [2, 0, 1]]


@pytest.mark.parametrize(
    "other",
    [
        pool(0x2000),
        Memory(0x1000, (12, 32), (64, 1)),  # a part of each row
        Memory(0x1000, (12, 64), (128, 1)),  # every second row
    ],
    ids=["elsewhere", "other widths", "other strides"],
)
def test_pools_are_one_only_if_they_are_the_same_memory(other):
    found = find([["a", "b"]], a=pool(0x1000), b=other)
    assert found.groups == [[0, 1]]
    assert [tensor.data_ptr() for tensor in found.tensors] == [0x1000, other.address]


def test_a_pool_of_exactly_the_schedulers_blocks_suffices():
    assert find([["a"]], a=pool(0x1000, rows=8)).tensors == [region(0x1000)]


@pytest.fixture(autouse=True)
def vllms_classes(monkeypatch):
    monkeypatch.setattr(vllm_api, "find", lambda name: lambda **fields: {name: fields})


def spec(kind="FullAttentionSpec"):
    return type(kind, (), {})()


def worker(size, kind="FullAttentionSpec"):
    groups = [
        SimpleNamespace(kv_cache_spec=spec(), layer_names=["a", "b"]),
        SimpleNamespace(kv_cache_spec=spec(kind), layer_names=["c"]),
    ]
    made = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups, num_blocks=8),
        spec=SimpleNamespace(config=SimpleNamespace(worker_kv_bytes_per_block=size)),
        given=[],
    )
    made._init_worker = made.given.append
    return made


CACHES = {
    name: SimpleNamespace(_kvcached_block_copy_view=view)
    for name, view in {"a": pool(0x1000), "b": pool(0x2000), "c": pool(0x3000, 32)}.items()
}


def reference(index, size):
    return {"CanonicalKVCacheRef": {"tensor_idx": index, "page_size_bytes": size}}


def tensor(one):
    return {"CanonicalKVCacheTensor": {"tensor": one, "page_size_bytes": one.shape[1]}}


def test_vllm_is_given_every_region_with_its_own_size():
    one = worker(160)
    registration.register_regions(pytest.fail, one, (CACHES,), {})
    regions = [region(0x1000), region(0x2000), region(0x3000, 32)]
    assert one.given == [
        {
            "CanonicalKVCaches": {
                "tensors": [tensor(each) for each in regions],
                "group_data_refs": [[reference(0, 64), reference(1, 64)], [reference(2, 32)]],
            }
        }
    ]
    assert state.find(one, Rows) == Rows([(0x1000, 64), (0x2000, 64), (0x3000, 32)])


@pytest.mark.parametrize(
    ("one", "code"),
    [(worker(159), "KVP407"), (worker(161), "KVP407"), (worker(160, kind="OtherSpec"), "KVP406")],
    ids=["a smaller block in the plan", "a larger one", "a kind that is not validated"],
)
def test_nothing_is_registered_that_does_not_fit(one, code):
    with pytest.raises(Refusal, match=code):
        registration.register_regions(pytest.fail, one, (CACHES,), {})
    assert one.given == []


def derived(*sizes):
    return SimpleNamespace(
        tensors=[
            SimpleNamespace(tensor=region(0x1000 * n, size), page_size_bytes=size)
            for n, size in enumerate(sizes, start=1)
        ]
    )


@pytest.mark.parametrize(
    ("sizes", "outside", "kind", "code"),
    [
        ((64, 64, 32), (), "FullAttentionSpec", None),
        ((64, 64, 32), (0x1000,), "FullAttentionSpec", "KVP408"),
        ((64, 64, 32), (0x3000,), "FullAttentionSpec", "KVP408"),
        ((64, 64), (), "FullAttentionSpec", "KVP407"),
        ((64, 64, 32, 32), (), "FullAttentionSpec", "KVP407"),
        ((64, 64, 32), (), "OtherSpec", "KVP406"),
    ],
)
def test_the_regions_that_vllm_derives_are_checked(monkeypatch, sizes, outside, kind, code):
    monkeypatch.setattr(
        registration, "on_kvcached", lambda region: region.data_ptr() not in outside
    )
    one, caches, ran = worker(160, kind), derived(*sizes), []

    def register(kv_caches):
        ran.append(kv_caches)
        return "registered"

    if code is not None:
        with pytest.raises(Refusal, match=code):
            registration.check_regions(register, one, (caches,), {})
        assert ran == []
    else:
        assert registration.check_regions(register, one, (caches,), {}) == "registered"
        assert ran == [caches]
        assert state.find(one, Rows) == Rows([(0x1000, 64), (0x2000, 64), (0x3000, 32)])


def test_there_is_no_cache_across_layers():
    assert registration.keep_elastic(lambda: True, None, (), {}) is False
