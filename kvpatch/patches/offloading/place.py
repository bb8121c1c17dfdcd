"""The cells of the matrix that a configuration is in, but for what is turned on."""

from __future__ import annotations

from typing import Any

from kvpatch import admitted
from kvpatch.upstream import connectors
from kvpatch.versions import Facts

# By the names of the cells: with nothing else turned on, and kinds of model.
ALONE = "none"
FULL = "full attention"
LATENT, SPARSE, HYBRID = admitted.LATENT, admitted.SPARSE, admitted.HYBRID
OFFLOADING = "Offloading"  # also without a connector


def starts_with(feature: str, config: Any, facts: Facts) -> bool:
    """Return whether engines ran with a feature in all cells that a configuration is in."""
    return admitted.admits(feature, facts.vllm, cells(config, facts))


def ran_with(name: str, config: Any, facts: Facts) -> bool:
    """Return whether what is no axis of the matrix ran with a configuration's model and connector.

    A kind of model that starts in its own cells only (``admitted.KINDS``) is asked by itself.
    """
    kind = kind_of(getattr(config, "model_config", None))
    return admitted.ran_with(name, facts.vllm, ways(config.kv_transfer_config), kind)


def cells(config: Any, facts: Facts) -> list[str]:
    """Return the names of the cells: one for each connector, and one for MultiConnector."""
    return [cell(config, facts, connector) for connector in ways(config.kv_transfer_config)]


def cell(config: Any, facts: Facts, connector: str) -> str:
    """Return the name of the cell of a configuration with a connector, whatever it has."""
    runner = "V2" if getattr(config, "use_v2_model_runner", False) else "V1"
    layout = "contiguous" if facts.contiguous else "non-contiguous"
    return admitted.name_of(runner, layout, connector, kind_of(config.model_config))


def ways(transfer: Any) -> list[str]:
    """Return the connectors of a configuration, by the names of the matrix' axis.

    Inside of MultiConnector its cell has OffloadingConnector; what else is there has its own. What
    runs beside OffloadingConnector runs without it.
    """
    if transfer is None or transfer.kv_connector is None:
        return [OFFLOADING]
    found = []
    for leaf in connectors.leaves(transfer):
        if leaf.name == connectors.SIMPLE:
            found.append("Simple lazy" if leaf.extra.get("lazy_offload") else "Simple eager")
        else:
            found.append(_behind(leaf.tiers) if leaf.tiers else OFFLOADING)
    if transfer.kv_connector != connectors.MULTI:
        return found
    return ["Multi", *(one for one in found if one != OFFLOADING)]


def _behind(tiers: Any) -> str:
    """Return the name of secondary tiers; other types than ``fs`` have no cells of their own."""
    return "tiering fs" if all(tier.get("type") == "fs" for tier in tiers) else "tiering"


def kind_of(model: Any) -> str:
    """Return the kind of a model, by the names of the matrix' axis; empty without one."""
    if model is None:
        return ""
    if is_hybrid(model):
        return HYBRID
    if model.use_mla:
        return SPARSE if has_indexer(model) else LATENT
    return "sliding window" if has_windows(model) else FULL


def is_hybrid(model: Any) -> bool:
    """Return whether a model has layers of a recurrent state beside attention."""
    return model is not None and bool(model.is_hybrid)


def has_delta_nets(model: Any) -> bool:
    """Return whether a hybrid's states are those of gated delta nets (Qwen3-Next, Qwen3.5)."""
    heads = getattr(getattr(model, "hf_text_config", None), "linear_num_value_heads", None)
    return is_hybrid(model) and bool(heads)


def has_indexer(model: Any) -> bool:
    """Return whether an indexer chooses the tokens that latent attention attends to."""
    return bool(getattr(getattr(model, "hf_text_config", None), "index_topk", None))


def has_windows(model: Any) -> bool:
    """Return whether a model has sliding windows."""
    return model is not None and model.get_sliding_window() is not None
