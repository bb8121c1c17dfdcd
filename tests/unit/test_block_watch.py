"""The oracle of restored bytes: which blocks must be what they were."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from harness.engines.block_watch import BlockWatch


class Planner:
    """A scheduler's part of SimpleCPUOffloadConnector, which loads into some blocks."""

    def __init__(self, loads):
        self.loads = loads

    def build_connector_meta(self, output):
        return SimpleNamespace(load_gpu_blocks=self.loads)


class Jobs:
    """A scheduler's part of OffloadingConnector, which loads into some blocks."""

    def __init__(self, loads):
        self.loads = loads

    def build_connector_meta(self, output):
        spec = SimpleNamespace(block_ids=SimpleNamespace(tolist=lambda: self.loads))
        return SimpleNamespace(load_jobs={0: SimpleNamespace(dst_spec=spec)})


def core_of(blocks=(), connector=None, drafting=None, extra=None, **more):
    """The core of an engine with these blocks of the device."""
    pool = SimpleNamespace(kv_block_pool=list(blocks))
    manager = SimpleNamespace(block_pool=pool)
    requests = more.pop("requests", {})
    transfer = None if extra is None else SimpleNamespace(kv_connector_extra_config=extra)
    return SimpleNamespace(
        scheduler=SimpleNamespace(kv_cache_manager=manager, requests=requests, connector=connector),
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(block_size=32),
            speculative_config=drafting,
            kv_transfer_config=transfer,
        ),
        **{"model_executor": None} | more,
    )


def watched(connector, loses=False):
    """Let a block come back to another place, with other bytes; return what the oracle saw."""
    digests = iter(("first", "second"))
    block = SimpleNamespace(block_hash=b"hash" + bytes(4), block_id=3)
    executor = SimpleNamespace(collective_rpc=lambda call, args: [[next(digests)]])
    watch = BlockWatch(core_of([block], connector, model_executor=executor), loses)
    watch.after_step()
    block.block_id = 7
    for one in getattr(connector, "_connectors", [connector]):
        for planner in vars(one or SimpleNamespace()).values():
            planner.build_connector_meta(None)
    watch.after_step()
    return watch.changed, watch.returned


@pytest.mark.parametrize(
    ("extra", "again"),
    [({}, [3]), ({"block_size": 64}, [2, 3]), ({"block_size": 128}, [0, 1, 2, 3])],
)
def test_a_head_that_reads_states_has_the_last_chunk_computed_again(extra, again):
    assert computed_again(extra, use_eagle=lambda: True) == again
    no_drop = {"use_eagle": lambda: True, "needs_eagle_block_drop": lambda: False}
    assert computed_again(extra, **no_drop) == []  # as DFlash's, which reads them alone


def computed_again(extra, **drafting):
    """Of four blocks of a prompt, those that vLLM computes again."""
    request = SimpleNamespace(num_prompt_tokens=4 * 32 + 5, block_hashes=list(range(4)))
    drafts = SimpleNamespace(**drafting)
    watch = BlockWatch(core_of(drafting=drafts, extra=extra, requests={"one": request}))
    watch.after_step()
    return sorted(watch.last)


@pytest.mark.parametrize(
    ("connector", "found"),
    [
        (None, ([7], 1)),
        (SimpleNamespace(scheduler_manager=Planner([7])), ([7], 1)),
        (SimpleNamespace(scheduler_manager=Planner([6])), ([], 0)),
    ],
    ids=["which comes back", "which was loaded", "which may have been computed again"],
)
def test_a_block_that_was_loaded_has_the_same_bytes(connector, found):
    assert watched(connector) == found


@pytest.mark.parametrize(
    ("loads", "found"), [([7], ([7], 1)), ([6], ([], 0))], ids=["loaded", "computed"]
)
def test_only_what_a_tier_loaded_has_the_same_bytes_where_blocks_are_lost(loads, found):
    assert watched(SimpleNamespace(connector_scheduler=Jobs(loads)), loses=True) == found
    assert watched(SimpleNamespace(connector_scheduler=Jobs(loads))) == ([7], 1)


@pytest.mark.parametrize(
    ("loads", "found"), [([7], ([7], 1)), ([6], ([], 0))], ids=["loaded", "computed"]
)
def test_what_each_of_several_connectors_loaded_is_known(loads, found):
    for other in (SimpleNamespace(), SimpleNamespace(scheduler_manager=Planner([5]))):
        one = SimpleNamespace(connector_scheduler=Jobs(loads))
        assert watched(SimpleNamespace(_connectors=[one, other]), loses=True) == found
        assert watched(SimpleNamespace(_connectors=[other, one]), loses=True) == found
