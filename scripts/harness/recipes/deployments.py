"""What public deployments turn on that kvpatch once refused, and what its rules say of it today.

Of 66 deployments with vLLM's own offloading or with kvcached, whose commands are in issues, charts
and launch files: how many have a feature, and the refusal that it met when they were read.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from harness.matrix import axes
from harness.recipes.configurations import RUNNER
from harness.recipes.table import Answer, ask
from kvpatch.matrix.verdicts import LAYOUTS, Cell
from kvpatch.patches.offloading import place

READ = 66


class Feature(NamedTuple):
    """What deployments turn on.

    Attributes:
        seen: the deployments that have it, or one like it.
        then: the codes that refused it when they were read.
        changes: to a configuration of OffloadingConnector, by path.
    """

    name: str
    seen: int
    then: str
    changes: Mapping[str, Any] = MappingProxyType({})
    model: str = place.FULL


def _ranks(count: int) -> dict[str, Any]:
    return {f"parallel_config.{name}_size": count for name in ("world", "tensor_parallel")}


def _connector(name: str, **extra: Any) -> dict[str, Any]:
    transfer = "kv_transfer_config.kv_connector"
    return {transfer: name, f"{transfer}_extra_config": extra}


def _drafts(method: str) -> dict[str, Any]:
    return {"speculative_config": SimpleNamespace(method=method)}


_FP8 = {"cache_config.cache_dtype": "fp8"}
_MOE = {"model_config.is_moe": True}
_EXPERTS = {"parallel_config.enable_expert_parallel": True} | _MOE
_MACHINES = {"parallel_config.nnodes_within_dp": 2}
_ENGINES = {f"parallel_config.data_parallel_size{end}": 8 for end in ("", "_local")}
_OFFLOADING, _SIMPLE, *_ = dict.fromkeys(one.connector for one in axes.CONNECTORS)
_BOTH = [{"kv_connector": one, "kv_role": "kv_both"} for one in ("NixlConnector", _OFFLOADING)]
_TIERING = "TieringOffloadingSpec"
FEATURES = (
    Feature("hybrid models", 14, "KVP313, KVP311", model=place.HYBRID),
    Feature("hybrid models, TP 4", 14, "KVP313, KVP311", _ranks(4), place.HYBRID),
    Feature(
        "hybrid models of gated delta nets (among these), TP 4",
        14,
        "KVP313, KVP311, KVP406",
        _ranks(4) | axes.DELTA_NETS,
        place.HYBRID,
    ),
    Feature("an fp8 KV cache, TP 4", 12, "KVP310", _FP8 | _ranks(4)),
    Feature("an fp8 KV cache of latent attention", 12, "KVP310", _FP8, place.LATENT),
    Feature("latent attention, TP 4", 10, "KVP305", _ranks(4), place.LATENT),
    Feature("latent attention with experts, TP 4", 10, "KVP305", _ranks(4) | _MOE, place.LATENT),
    Feature(
        "latent attention with an indexer, TP 4",
        10,
        "KVP305, KVP406",
        _ranks(4),
        place.SPARSE,
    ),
    Feature("drafts by mtp, TP 4", 10, "KVP309", _drafts("mtp") | _ranks(4)),
    Feature("drafts by dspark or dflash", 10, "KVP309", _drafts("dspark")),
    Feature("LMCache", 9, "KVP302", _connector("LMCacheConnectorV1")),
    Feature("sleep mode", 7, "KVP341", {"model_config.enable_sleep_mode": True}),
    Feature("TP over two machines", 6, "none: it broke", _MACHINES),
    Feature("offloading specs of others", 6, "KVP303", _connector(_OFFLOADING, spec_name="Other")),
    Feature(
        "prefill and decode apart (NixlConnector beside OffloadingConnector)",
        5,
        "KVP319",
        _connector("MultiConnector", connectors=_BOTH),
    ),
    Feature("data parallel with experts", 5, "KVP374", _ENGINES | _EXPERTS),
    Feature("Ray's executor", 2, "KVP308", {"parallel_config.distributed_executor_backend": "ray"}),
    Feature("LoRA", 2, "KVP332", {"lora_config": SimpleNamespace(max_loras=1)}),
    Feature(
        "the tier p2p",
        2,
        "KVP364",
        _connector(_OFFLOADING, spec_name=_TIERING, secondary_tiers=[{"type": "p2p"}]),
    ),
    Feature(
        "SimpleCPUOffloadConnector on a disk",
        2,
        "KVP315",
        _connector(_SIMPLE, kv_offload_backend="disk"),
    ),
)


def configuration(feature: Feature, vllm: str) -> Any:
    """Return the ``VllmConfig`` of a deployment that has a feature and nothing else."""
    cell = Cell(vllm, RUNNER, LAYOUTS[0], place.OFFLOADING, feature.model)
    return axes.configured(axes.configuration_of(cell), feature.changes)


def answers(vllm: str) -> Iterator[tuple[Feature, Answer]]:
    """Yield what the rules say of each feature."""
    for one in FEATURES:
        yield one, ask(configuration(one, vllm), vllm)
