"""The host pool: what ``KVPATCH_HOST_POOL`` asks for, and what running engines have of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvpatch import environ, host_memory
from kvpatch.doctor.finding import Finding, Topic
from kvpatch.environ import HOST_POOL, HOST_POOL_FLOOR
from kvpatch.host_memory import HostMemory
from kvpatch.patches.host_pool.rules import floor as floor_of
from kvpatch.pool import ledger
from kvpatch.sizes import readable

TOPIC = Topic("host pool")


def check(settings: Mapping[str, str]) -> list[Finding]:
    """Report the pool, if one is asked for, and sizes for which engines are refused."""
    text = HOST_POOL.read(settings)
    try:
        size, name = environ.pool(text) if text else (0, "")
        floor = floor_of(settings)
    except ValueError:
        return []  # reported with the environment
    found = list(too_large(size, floor, host_memory.here()))
    return [*found, *shared(text, size, name)] if text else found


def too_large(size: int, floor: int, memory: HostMemory) -> Iterator[Finding]:
    """Yield what of the sizes is more than there is."""
    if floor > size:
        what = f"{HOST_POOL_FLOOR} is {readable(floor)}, and {HOST_POOL} is "
        what += f"{readable(size)}" if size else "unset"
        remedy = f"set {HOST_POOL} to the size of the pool, or unset {HOST_POOL_FLOOR}"
        yield TOPIC.problem(f"{what}: no engine with a connector starts", remedy, "KVP349")
    if size > memory.free_in_shm:
        what = f"{HOST_POOL} is {readable(size)}, and beside what its engines have there are "
        what += f"{readable(memory.free_in_shm)} for it"
        remedy = "set it to what there is: an engine that may take more is refused (KVP348)"
        yield TOPIC.warning(what, remedy)


def shared(text: str, size: int, name: str) -> list[Finding]:
    """Report what running engines have of the pool."""
    try:
        shown = ledger.show(ledger.home(name))
    except (ledger.Busy, ledger.Foreign, OSError) as error:
        what = f"the ledger {ledger.home(name)} cannot be read ({type(error).__name__}: {error})"
        return [TOPIC.problem(what, "stop the engines of the pool")]
    if shown is None:
        return [TOPIC.ok(f"no engine is in the pool of {readable(size)}")]
    limit, engines = shown
    committed = sum(one.owner.committed for one in engines)
    what = (
        f"{len(engines)} engines have committed {readable(committed)} of {readable(limit.current)}"
    )
    if limit.configured != size:
        what += f"; they were started with {readable(limit.configured)}, and {HOST_POOL} is "
        what += f"{text}, so that another engine is refused"
        remedy = f"set {HOST_POOL} to the same size; kvpatch pool SIZE changes the limit"
        return [TOPIC.problem(what, remedy)]
    return [TOPIC.ok(what)]
