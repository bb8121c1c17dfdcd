"""What is told of the memory that an engine lends, and of what it gave back, for whatever reason.

The code of suspensions is imported only by engines that have one, and the metrics by all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from kvpatch import state
from kvpatch.environ import HOST_POOL

# Why blocks were stored: for a suspension, a lower limit, or because nobody asked for a while.
REASONS = ("suspend", "limit", "idle")
_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")


class Suspended(NamedTuple):
    """An engine's part in this, see ``telemetry.schema``; kept on its ``EngineCore``."""

    describe: Callable[[], dict[str, Any]]


def of(core: Any) -> dict[str, Any]:
    """Return what is told of an engine; nothing where it cannot be asked to lend."""
    part = state.find(core, Suspended)
    return {} if part is None else part.describe()


def expected(
    features: Mapping[str, str], connectors: Collection[str], disks: Collection[Any]
) -> bool:
    """Whether engines can be suspended, as far as an API server can tell."""
    alone = len(connectors) == 1 and not disks and set(connectors) <= {*_CONNECTORS}
    return features.get("suspend") == "applied" and alone and not HOST_POOL.read()
