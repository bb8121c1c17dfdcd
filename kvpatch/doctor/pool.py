"""The host pool: what ``KVPATCH_HOST_POOL`` asks for, and what running engines have of it."""

from __future__ import annotations

from collections.abc import Mapping

from kvpatch import environ
from kvpatch.doctor.finding import Finding, Level
from kvpatch.environ import HOST_POOL
from kvpatch.pool import ledger
from kvpatch.sizes import readable

TOPIC = "host pool"


def check(settings: Mapping[str, str]) -> list[Finding]:
    """Report the pool, if one is asked for."""
    text = HOST_POOL.read(settings)
    if not text:
        return []
    try:
        size, name = environ.pool(text)
    except ValueError:
        return []  # reported with the environment
    try:
        shown = ledger.show(ledger.home(name))
    except (ledger.Busy, ledger.Foreign, OSError) as error:
        what = f"the ledger {ledger.home(name)} cannot be read ({type(error).__name__}: {error})"
        return [Finding(TOPIC, Level.PROBLEM, what, "stop the engines of the pool")]
    if shown is None:
        return [Finding(TOPIC, Level.OK, f"no engine is in the pool of {readable(size)}")]
    limit, engines = shown
    committed = sum(one.owner.committed for one in engines)
    what = (
        f"{len(engines)} engines have committed {readable(committed)} of {readable(limit.current)}"
    )
    if limit.configured != size:
        return [
            Finding(
                TOPIC,
                Level.PROBLEM,
                f"{what}; they were started with {readable(limit.configured)}, and {HOST_POOL} is "
                f"{text}, so that another engine is refused",
                f"set {HOST_POOL} to the same size; kvpatch pool SIZE changes the limit",
            )
        ]
    return [Finding(TOPIC, Level.OK, what)]
