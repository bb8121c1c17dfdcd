"""What must always hold."""

INVARIANTS = {
    "mapped": "no copy and no computation touches an unmapped page",
    "bytes": "a block served from the device, the CPU tier or the disk has the bytes of its hash",
    "tokens": "each finished request has the tokens of its prompt",
    "tier": "each ready block of the CPU tier has the bytes of its hash",
    "limit": "no page is mapped above the limit or beyond the device's memory",
    "ends": "each request ends, or waits for a named reason while the reason lasts",
    "leaks": "no block, page, chunk, transfer or file is left when all requests have ended",
    "fence": "pages that the fence holds come back, also when the engine is idle",
    "once": "a report that is repeated changes nothing",
    "rollback": "a plan of patches that fails is undone wholly",
    "pool": "host memory is committed, counted and registered alike, within the limit, and no copy "
    "touches what was given back",
    "alive": "the engine raises nothing",
}


class Violation(AssertionError):
    """An invariant, by its name in ``INVARIANTS``, does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        assert invariant in INVARIANTS
        super().__init__(f"{invariant}: {what}")
