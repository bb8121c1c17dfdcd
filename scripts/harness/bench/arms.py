"""The arms of the comparison, at equal budgets of device and host memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from harness import connectors
from harness.bench.sizes import BLOCK_BYTES, BLOCK_TOKENS, Size
from harness.processes import ONE_THREAD
from harness.serve import MODEL_NAME, SPARE_PAGES, Kind

CONNECTORS = ("offloading", "simple eager", "simple lazy")


@dataclass(frozen=True)
class Arm:
    """One way to keep KV.

    Attributes:
        name: in messages and on the page.
        elastic: on kvcached's memory, or on vLLM's own.
        connector: one of ``CONNECTORS``, or empty for none.
        twin: the same settings as another arm: the difference of the two is the noise.
    """

    name: str
    elastic: bool = False
    connector: str = ""
    twin: bool = False


PLAIN = Arm("plain vLLM")
STATIC = Arm("vLLM + offloading", connector="offloading")
KVCACHED = Arm("kvcached alone", elastic=True)
KVPATCH = Arm("kvcached + kvpatch", elastic=True, connector="offloading")
TWIN = Arm("kvcached + kvpatch, again", elastic=True, connector="offloading", twin=True)
EAGER = Arm("kvcached + kvpatch, simple eager", elastic=True, connector="simple eager")
LAZY = Arm("kvcached + kvpatch, simple lazy", elastic=True, connector="simple lazy")

# Static memory has no simple connector here: the host device's copies for it come with
# kvpatch, which then wants elastic memory. A GPU has vLLM's own.
ALL = (PLAIN, STATIC, KVCACHED, KVPATCH, TWIN, EAGER, LAZY)
DECIDING = (PLAIN, STATIC, KVCACHED, KVPATCH, TWIN)


def connector_config(
    connector: str, cpu_bytes: int, without_kvpatch: bool = False
) -> connectors.Config:
    """Return vLLM's ``kv_transfer_config`` of one of ``CONNECTORS``."""
    if connector == "offloading":
        return connectors.offloading(cpu_bytes, without_kvpatch)
    return connectors.simple(cpu_bytes, lazy=connector == "simple lazy")


def engine_arguments(size: Size, blocks: int) -> dict[str, str]:
    """Return the arguments of ``vllm serve`` that all arms share."""
    return {
        "served-model-name": MODEL_NAME,
        "dtype": "float32",
        "max-model-len": str(size.max_model_len),
        "max-num-batched-tokens": "2048",
        "max-num-seqs": str(size.peak),
        "block-size": str(BLOCK_TOKENS),
        "num-gpu-blocks-override": str(blocks),
        "seed": "0",
    }


def kind(
    arm: Arm, size: Size, blocks: int, slug: str, environment: dict[str, str] | None = None
) -> Kind:
    """Return a server of an arm.

    Args:
        arm: which.
        size: of the run.
        blocks: KV blocks of its scheduler.
        slug: different for all servers that run at once.
        environment: more of the server's environment.
    """
    arguments = engine_arguments(size, blocks)
    if arm.connector:
        config = connector_config(
            arm.connector, size.tier_blocks * BLOCK_BYTES, without_kvpatch=not arm.elastic
        )
        arguments["kv-transfer-config"] = json.dumps(config)
        arguments["worker-extension-cls"] = "harness.bench.probe.CopyCounter"
    # The host device runs kvcached only with kvpatch on; without a connector that is all it does.
    own = {"KVPATCH": "1", **SPARE_PAGES} if arm.elastic else {"KVPATCH": "0"}
    return Kind(arm.name, slug, arguments, ONE_THREAD | own | (environment or {}))


def settings(kinds: dict[str, Kind]) -> dict[str, Any]:
    """Return the settings of the arms, for the result file."""
    return {
        name: {
            "arguments": dict(one.arguments),
            "environment": dict(one.environment),
        }
        for name, one in kinds.items()
    }
