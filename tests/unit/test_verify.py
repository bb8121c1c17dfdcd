"""Memory that is not kvcached's: an engine or a worker on it does not start."""

import threading
from types import SimpleNamespace

import pytest
from fakes import module, namespace

from kvpatch.patches.elastic_memory import verify
from kvpatch.refusal import Refusal
from kvpatch.upstream import kvcached_api


class ElasticBlockPool:
    """kvcached's, by its name; its thread reserves the null block in ``null_block_after`` s."""

    def __init__(self, null_block_after=0.0, null_block=(0,)):
        done = threading.Event()
        threading.Timer(null_block_after, done.set).start()
        self.kv_cache_manager = SimpleNamespace(_post_init_done=done, null_block=[*null_block])


@pytest.fixture
def record(monkeypatch):
    """The status of this process; ``said`` has its roles whenever it was logged."""
    made = SimpleNamespace(roles=[], elastic=None, layout="", said=[])
    made.say = lambda: made.said.append(list(made.roles))
    monkeypatch.setattr(verify, "record", made)
    module(monkeypatch, "vllm.v1.core.block_pool", ElasticBlockPool=ElasticBlockPool)
    monkeypatch.setattr(kvcached_api, "describe_layout", lambda config: f"layout of {config}")
    return made


def engine(pool):
    return namespace(scheduler__kv_cache_manager__block_pool=pool, vllm_config="config")


def cache(inside):
    return SimpleNamespace(_kvcached_block_copy_view=object() if inside else None)


def worker(record, *inside):
    caches = {f"layer.{index}": cache(one) for index, one in enumerate(inside)}
    assert verify.around_kv_cache_tensors(lambda *args: caches, None, (), {}) is caches


def test_an_engine_on_vllms_own_pool_does_not_start(record):
    with pytest.raises(Refusal, match="KVP401"):
        verify.around_engine_core(lambda: None, engine(object()), (), {})
    assert record.elastic is None
    assert record.said == []


def test_an_engine_with_its_worker_in_the_same_process_says_so_once(record):
    record.roles, record.elastic = ["frontend"], True
    seen = []

    def start(*args, **kwargs):
        seen.append((args, kwargs, record.elastic))
        worker(record, True)

    verify.around_engine_core(start, engine(ElasticBlockPool()), ("a",), {"b": 1})
    assert seen == [(("a",), {"b": 1}, None)]
    assert record.said == [["engine-core", "worker"]]
    assert record.elastic is True
    assert record.layout == "layout of config"


@pytest.mark.parametrize(("after", "waits"), [(0.2, None), (1.0, 0.01)])
def test_an_engine_has_started_when_its_pool_has_its_null_block(record, monkeypatch, after, waits):
    """Before that, the count of free blocks is one too high; a device may have no page for it."""
    if waits:
        monkeypatch.setattr(verify, "_NULL_BLOCK", waits)
    pool = ElasticBlockPool(null_block_after=after)
    verify.around_engine_core(lambda: None, engine(pool), (), {})
    assert pool.kv_cache_manager._post_init_done.is_set() is (waits is None)
    # Its workers are other processes.
    assert record.elastic is True
    assert record.said == [["engine-core"]]


@pytest.mark.parametrize("reserved", [(), (7,)])
def test_an_engine_whose_null_block_was_not_reserved_is_refused(record, reserved):
    """Kvcached logs it and goes on: a request would get block 0."""
    with pytest.raises(Refusal, match="KVP429"):
        verify.around_engine_core(
            lambda: None, engine(ElasticBlockPool(null_block=reserved)), (), {}
        )
    assert record.said == []


def test_a_worker_of_its_own_says_so_itself(record):
    worker(record, True, True)
    assert record.said == [["worker"]]
    assert record.elastic is True


def test_one_layer_outside_is_enough(record):
    with pytest.raises(Refusal, match=r"layer\.1 was allocated outside") as refused:
        worker(record, True, False, True)
    assert refused.value.code == "KVP402"
    assert record.said == []


def test_a_worker_without_layers_is_not_called_elastic(record):
    worker(record)
    assert record.elastic is False


def test_the_memory_that_kvcached_allocated_is_known(monkeypatch):
    known = []
    monkeypatch.setattr(kvcached_api, "remember_storages", lambda caches: known.extend(caches))
    caches = {"a": "one", "b": "two"}
    assert verify.remember_allocation(lambda *args: caches, None, (), {}) is caches
    assert known == ["one", "two"]


@pytest.mark.parametrize(
    ("args", "kwargs", "profiling"),
    [
        (("config",), {}, False),
        (("config", True), {}, True),
        (("config", False), {}, False),
        (("config",), {"is_profiling": True}, True),
        (("config",), {"is_profiling": False}, False),
    ],
)
def test_vllms_own_views_are_checked_unless_they_are_discarded(
    record, monkeypatch, args, kwargs, profiling
):
    monkeypatch.setattr(kvcached_api, "on_kvcached", lambda cache: cache)
    runner = SimpleNamespace(kv_caches=[True, True, False])

    def run():
        return verify.around_initialize_kv_cache(
            lambda *given, **named: (given, named), runner, args, kwargs
        )

    if profiling:
        assert run() == (args, kwargs)
        assert record.said == []
    else:
        with pytest.raises(Refusal, match="layer 2 was allocated outside"):
            run()
        runner.kv_caches = [True]
        assert run() == (args, kwargs)
        assert record.said == [["worker"]]
