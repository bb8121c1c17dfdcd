"""A pytest plug-in: the engine's part in vLLM's tests, for the run with kvpatch.

vLLM's tests build schedulers, coordinators, connectors and tiers without an engine and workers.
kvcached and kvpatch need what these would have done: the KV tensors are made, the workers have
described their blocks, a request has a context of its own. All else is real: kvcached's pool, its
allocator and its memory on the host device, and every patch.
"""

import importlib
import inspect
import multiprocessing
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import pytest

DEVICE = "cuda:0"  # kvcached's name of the host device
RESERVED = 4 << 30  # address space of the KV tensors
MAPPED = 3 << 29  # what a test's blocks may take together: less than the host device has
# Where the helper of vLLM's tests has NixlConnector unless told otherwise, though they are about
# OffloadingConnector or about no connector at all.
NOT_ABOUT_NIXL = (
    "offloading_connector",
    "test_error_propagation",
    "test_invalid_blocks",
    "test_kv_load_failure",
    "test_cache_pollution",
)

_made = False


def make_tensors(geometry: Any) -> None:
    """Make the KV tensors of an engine; those of the engine before it go."""
    from kvcached.integration.vllm import interfaces
    from kvcached.utils import PAGE_SIZE

    global _made
    shut_down()
    _made = True
    interfaces.init_kvcached(tp_rank=0, world_size=1, is_worker=True, device=DEVICE)
    size = RESERVED // geometry.num_pools // PAGE_SIZE * PAGE_SIZE
    interfaces.create_kv_tensors(
        size, 1, DEVICE, geometry.num_pools, num_kv_buffers=1, unified_pool=True
    )


def shut_down() -> None:
    """Release the KV tensors of a test."""
    from kvcached.integration.vllm import interfaces

    global _made
    if _made:
        interfaces.shutdown_kvcached()
    _made = False


def geometry_of(blocks: int, tokens: int) -> Any:
    """Return the geometry of a pool: a block has a page of 2 MiB, less if all would not fit.

    A test's own blocks have a few bytes, of which kvcached's page has too many to manage. Pages
    are powers of two, and so are the parts that kvcached divides a block into.
    """
    from kvcached.integration.vllm.model_runner_v2 import CacheGeometry

    size = 2 << 20
    while blocks * size > MAPPED and size > 4096:
        size //= 2
    return CacheGeometry(tokens & -tokens, size, 1)


def sized(wrapped: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return kvcached's ``cache_geometry``, without sums on memory that tests do not have."""

    @wraps(wrapped)
    def cache_geometry(config: Any) -> Any:
        from vllm.v1 import kv_cache_interface as kinds

        specs: list[Any] = []
        for group in config.kv_cache_groups:
            spec = group.kv_cache_spec
            specs += getattr(spec, "kv_cache_specs", {"": spec}).values()
        attention = [one for one in specs if isinstance(one, kinds.AttentionSpec)]
        managed = (
            kinds.FullAttentionSpec,
            kinds.SlidingWindowSpec,
            kinds.MLAAttentionSpec,
            kinds.MambaSpec,
        )
        if not attention or any(type(one) not in managed for one in specs):
            return wrapped(config)  # which says what kvcached does not manage
        return geometry_of(config.num_blocks, attention[0].block_size)

    return cache_geometry


def with_tensors(wrapped: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return kvcached's set-up of a coordinator, with the workers' part before it."""

    @wraps(wrapped)
    def set_up(self: Any) -> None:
        from kvcached.integration.vllm import model_runner_v2

        make_tensors(model_runner_v2.cache_geometry(self.kv_cache_config))
        wrapped(self)
        self.block_pool.kv_cache_manager._wait_post_init()  # takes the null block in a thread

    return set_up


def elastic_pool(
    num_gpu_blocks: int, enable_caching: bool, hash_block_size: int, **options: Any
) -> Any:
    """Return kvcached's pool in the place of the ``BlockPool`` that a test makes."""
    from vllm.v1.core.block_pool import ElasticBlockPool

    geometry = geometry_of(num_gpu_blocks, hash_block_size)
    make_tensors(geometry)
    pool = ElasticBlockPool(
        num_gpu_blocks,
        geometry.block_size,
        cell_size=geometry.cell_size,
        num_layers=1,
        enable_caching=enable_caching,
        num_kv_buffers=1,
        hash_block_size=hash_block_size,
        **options,
    )
    pool.kv_cache_manager._wait_post_init()
    return pool


def pytest_configure() -> None:
    """Put the workers' part into kvcached, once kvpatch has been applied."""
    import vllm  # noqa: F401
    from kvcached.integration.vllm import interfaces, model_runner_v2
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator

    interfaces.start_worker_listener_thread = lambda *args, **kwargs: None  # there are no workers
    model_runner_v2.cache_geometry = sized(model_runner_v2.cache_geometry)
    KVCacheCoordinator._setup_kvcached_coordinator = with_tensors(
        KVCacheCoordinator._setup_kvcached_coordinator
    )


@pytest.fixture(autouse=True)
def engine_part(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Play the engine's part around a test."""
    from kvpatch import state
    from kvpatch.patches.secondary_tiers import fingerprint

    module = request.module
    monkeypatch.setattr(fingerprint, "_described", "described")
    for name, value in vars(module).items():
        if name.endswith("_CTX"):  # of all requests of a file, and so of all its tests
            getattr(value, "__dict__", {}).pop(state.ATTRIBUTE, None)
    if "simple" in module.__name__ and hasattr(module, "BlockPool"):
        monkeypatch.setattr(module, "BlockPool", elastic_pool)
    if hasattr(module, "get_mp_context"):
        # vLLM forks unless a GPU is in use, which the host device says it is; a new process
        # would import vLLM in the 30 s that these tests give it.
        monkeypatch.setattr(module, "get_mp_context", partial(multiprocessing.get_context, "fork"))
    if module.__name__.endswith("test_file_mapper"):  # whose folders are names and no more
        monkeypatch.setattr(fingerprint, "own_folder", lambda folder: None)
    if any(part in module.__name__ for part in NOT_ABOUT_NIXL):
        offloading(monkeypatch, "offloading_connector" in module.__name__)
    yield
    shut_down()


def offloading(monkeypatch: pytest.MonkeyPatch, configured: bool) -> None:
    """Let the helper's default be OffloadingConnector, and pass the memory of mocked workers.

    Args:
        monkeypatch: of the test.
        configured: the test gives it a configuration of its own.
    """
    from kvpatch.patches.offloading import registration

    utils = importlib.import_module("tests.v1.kv_connector.unit.utils")

    monkeypatch.setattr(registration, "on_kvcached", lambda tensor: True)
    monkeypatch.setattr(registration, "check_size", lambda worker, size: None)
    new: dict[str, Any] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    if not configured:
        new["kv_connector_extra_config"] = {"cpu_bytes_to_use": 1 << 30}
    defaults = inspect.signature(utils.create_vllm_config).parameters.values()
    monkeypatch.setattr(
        utils.create_vllm_config,
        "__defaults__",
        tuple(new.get(one.name, one.default) for one in defaults),
    )
