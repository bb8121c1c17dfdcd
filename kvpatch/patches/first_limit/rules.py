"""Where a first limit is validated."""

from __future__ import annotations

from typing import Any

from kvpatch import admitted
from kvpatch.environ import FIRST_LIMIT
from kvpatch.patches.offloading import place
from kvpatch.rules import Rule
from kvpatch.versions import Facts

NAME = "first limit"  # in the table of what ran


def _elsewhere(config: Any, facts: Facts) -> bool:
    is_set = bool(FIRST_LIMIT.read(facts.environment))
    return is_set and not place.ran_with(NAME, config, facts)


RULES = (
    Rule(
        "KVP373",
        f"`{FIRST_LIMIT}`" + admitted.but(NAME),
        _elsewhere,
        f"{FIRST_LIMIT} is set on this release and with this connector",
        f"a limit at the start is validated {admitted.with_connectors(NAME)} only",
        f"unset {FIRST_LIMIT}, or use one of these",
        with_connector=False,
    ),
)
