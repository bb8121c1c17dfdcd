"""What is told of an engine's part in a host pool, without the pool's code."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class HostPool(NamedTuple):
    """An engine's part in a pool, see ``telemetry.schema``; kept on its ``EngineCore``."""

    describe: Callable[[], dict[str, object]]
