"""What vLLM's SimpleCPUOffloadConnector does without a prefix cache, without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.simple_cpu_offload_connector import (
    SimpleCPUOffloadConnector,
)


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_vllm_switches_it_off(role):
    """The reason of KVP392."""
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}, kv_role="kv_both"),
        cache_config=SimpleNamespace(enable_prefix_caching=False),
        parallel_config=SimpleNamespace(world_size=1),
    )
    made = SimpleCPUOffloadConnector(config, role, SimpleNamespace())  # type: ignore[arg-type]
    assert made.scheduler_manager is made.worker_handler is None
