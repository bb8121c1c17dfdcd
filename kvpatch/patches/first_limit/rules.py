"""Where a first limit is validated."""

from __future__ import annotations

from typing import Any

from kvpatch.environ import FIRST_LIMIT
from kvpatch.rules import Rule
from kvpatch.versions import Facts, in_words

# A release enters when tests/long/test_first_limit.py ran on it, or that of
# tests/versions/test_suspend_on_releases.py.
RELEASES: tuple[str, ...] = ("0.32.0", "0.33.0")
_WHERE = f"on vLLM {in_words(list(RELEASES))} only" if RELEASES else "on no release yet"


def _elsewhere(config: Any, facts: Facts) -> bool:
    return bool(FIRST_LIMIT.read(facts.environment)) and not (
        RELEASES and facts.vllm.is_one_of(list(RELEASES))
    )


RULES = (
    Rule(
        "KVP373",
        f"`{FIRST_LIMIT}`" + (f", except {_WHERE.removesuffix(' only')}" if RELEASES else ""),
        _elsewhere,
        f"{FIRST_LIMIT} is set",
        f"a limit at the start is validated {_WHERE}",
        f"unset {FIRST_LIMIT}" + (", or install one of these releases" if RELEASES else ""),
        with_connector=False,
    ),
)
