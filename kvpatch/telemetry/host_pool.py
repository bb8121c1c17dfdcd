"""What is told of an engine's part in a host pool.

The pool's code is imported only by engines that have one, and the metrics by all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class HostPool(NamedTuple):
    """An engine's part in a pool, see ``telemetry.schema``; kept on its ``EngineCore``."""

    describe: Callable[[], dict[str, object]]
