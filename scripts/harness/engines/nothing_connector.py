"""A connector that keeps nothing: company for another inside a MultiConnector."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


class NothingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Finds nothing, loads nothing and saves nothing."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None


def allow() -> None:
    """Make it one of vLLM's connectors, and a validated one."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvpatch.patches.offloading import connector_rules

    KVConnectorFactory.register_connector("NothingConnector", __name__, "NothingConnector")
    connector_rules.VALIDATED_INSIDE += ("NothingConnector",)  # type: ignore[assignment]
