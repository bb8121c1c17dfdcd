"""The connectors of a configuration and of an engine, including those in a MultiConnector."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

OFFLOADING = "OffloadingConnector"
SIMPLE = "SimpleCPUOffloadConnector"
MULTI = "MultiConnector"
CPU_SPEC = "CPUOffloadingSpec"  # of an OffloadingConnector that names none


class Leaf(NamedTuple):
    """A configured connector, by itself or inside a MultiConnector."""

    name: str  # ``kv_connector``
    module: str | None  # ``kv_connector_module_path``, or None for vLLM's own
    extra: dict[str, Any]  # ``kv_connector_extra_config``

    @property
    def tiers(self) -> list[Any]:
        """Its secondary tiers, as configured."""
        return _objects(self.configured_tiers)

    @property
    def configured_tiers(self) -> Any:
        """What is configured as the list of its secondary tiers; None where vLLM reads none."""
        if self.name == SIMPLE:
            return None
        return None if self.spec == CPU_SPEC else self.extra.get("secondary_tiers")

    @property
    def spec(self) -> str:
        """The name of its spec, where it is an OffloadingConnector."""
        return str(self.extra.get("spec_name", CPU_SPEC))


def leaves(transfer: Any) -> list[Leaf]:
    """Return the connectors that a ``KVTransferConfig`` configures; none for None."""
    if transfer is None or transfer.kv_connector is None:
        return []
    extra = transfer.kv_connector_extra_config or {}
    module = transfer.kv_connector_module_path
    if transfer.kv_connector != MULTI or module is not None:
        return [Leaf(transfer.kv_connector, module, extra)]
    return [
        Leaf(
            str(child.get("kv_connector")),
            child.get("kv_connector_module_path"),
            child.get("kv_connector_extra_config") or {},
        )
        for child in _objects(extra.get("connectors"))
    ]


def no_list(transfer: Any) -> str:
    """Return the setting that should be a list of objects and is not; empty if there is none."""
    lists = [("secondary_tiers", leaf.configured_tiers) for leaf in leaves(transfer)]
    if transfer.kv_connector == MULTI and transfer.kv_connector_module_path is None:
        lists.append(("connectors", (transfer.kv_connector_extra_config or {}).get("connectors")))
    return next(
        (name for name, given in lists if given is not None and _objects(given) != given), ""
    )


def _objects(given: Any) -> list[dict[str, Any]]:
    """Return the objects of what is configured as a list of them."""
    return [one for one in given if isinstance(one, dict)] if isinstance(given, list) else []


def offloading(transfer: Any) -> list[Leaf]:
    """Return the ``leaves`` that are vLLM's OffloadingConnector."""
    return [leaf for leaf in leaves(transfer) if leaf.name == OFFLOADING and leaf.module is None]


def parts(connector: Any) -> Iterator[Any]:
    """Iterate over an engine's connectors: this one, or those in a MultiConnector, in order."""
    inside = getattr(connector, "_connectors", None)
    if inside is None:
        yield connector
    else:
        for child in inside:
            yield from parts(child)


def scheduler_of(connector: Any) -> Any:
    """Return the scheduler side of the OffloadingConnector in ``connector``; None without."""
    for part in parts(connector):
        found = getattr(part, "connector_scheduler", None)
        if found is not None and type(part).__name__ == OFFLOADING:
            return found
    return None
