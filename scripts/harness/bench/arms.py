"""The arms of the comparison, at equal budgets of device and host memory."""

from __future__ import annotations

import json
from dataclasses import dataclass

from harness import connectors, serve
from harness.bench.sizes import BLOCK_BYTES, BLOCK_TOKENS, Size
from harness.processes import ONE_THREAD
from harness.serve import SPARE_PAGES, Kind


@dataclass(frozen=True)
class Arm:
    """One way to keep KV.

    Attributes:
        name: in messages and on the page.
        elastic: on kvcached's memory, or on vLLM's own.
        offloads: with an OffloadingConnector.
        simple: with SimpleCPUOffloadConnector in its place, eager.
        twin: the same settings as another arm: the difference of the two is the noise.
    """

    name: str
    elastic: bool = False
    offloads: bool = False
    simple: bool = False
    twin: bool = False


PLAIN = Arm("plain vLLM")
STATIC = Arm("vLLM + offloading", offloads=True)
KVCACHED = Arm("kvcached alone", elastic=True)
KVPATCH = Arm("kvcached + kvpatch", elastic=True, offloads=True)
TWIN = Arm("kvcached + kvpatch, again", elastic=True, offloads=True, twin=True)
SIMPLE = Arm("kvcached + kvpatch, SimpleCPUOffload", elastic=True, offloads=True, simple=True)
ALL = (PLAIN, STATIC, KVCACHED, KVPATCH, TWIN)
# Without kvpatch SimpleCPUOffloadConnector starts on a GPU only.
ANSWERING = (PLAIN, STATIC, KVPATCH, SIMPLE, TWIN)


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
    arguments = serve.arguments(blocks, BLOCK_TOKENS, size.max_model_len, size.peak)
    if arm.offloads:
        tier = size.tier_blocks * BLOCK_BYTES
        if arm.simple:
            config = connectors.simple(tier, lazy=False)
        else:
            config = connectors.offloading(tier, without_kvpatch=not arm.elastic)
            arguments["worker-extension-cls"] = "harness.bench.probe.CopyCounter"
        arguments["kv-transfer-config"] = json.dumps(config)
    # The host device runs kvcached only with kvpatch on; without a connector that is all it does.
    own = {"KVPATCH": "1", **SPARE_PAGES} if arm.elastic else {"KVPATCH": "0"}
    return Kind(arm.name, slug, arguments, ONE_THREAD | own | (environment or {}))
