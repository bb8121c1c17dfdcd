"""What the metrics say of an engine that lends memory: by how much, and what it gave back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvpatch import environ, state
from kvpatch.environ import FIRST_LIMIT
from kvpatch.patches.suspend.counts import Counts
from kvpatch.telemetry.series import Sender
from kvpatch.telemetry.suspended import Suspended
from kvpatch.upstream import kvcached_api


def tell(engine: Any, counts: Counts | None, phase: Callable[[], str]) -> None:
    """Let the status page and metrics of an engine have what it gave back, and its phase."""
    first = first_limit_bytes(kvcached_api.manager_of(engine))

    def describe() -> dict[str, Any]:
        given = None if counts is None else counts.describe()
        last = None if counts is None else counts.last
        return {
            "first_limit_bytes": first,
            "suspended": given,
            "last_suspension": last,
            "phase": phase(),
        }

    state.attach(engine, Suspended(describe))
    state.of(engine, Sender).more = describe


def first_limit_bytes(manager: Any) -> int:
    """Return the limit that an engine had at its start, in whole pages, as kvcached keeps it.

    Later limits are measured against it: what is below is lent, what is above is borrowed.
    """
    most, text = kvcached_api.most(manager), FIRST_LIMIT.read()
    first = min(environ.share(text).of(most), most) if text else most
    page = kvcached_api.page_bytes(manager)
    return first // page * page
