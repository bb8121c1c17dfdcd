"""Rows that a test takes out of an engine's process.

A row that is not in force cannot be taken out. An engine would end by that alone, and so would a
test pass that expects it to end without the row. So the process ends with a status of its own,
which ``run_driver`` raises as an error.
"""

import os
from collections.abc import Iterable

NOT_IN_FORCE = 99  # exit status; vLLM and Python have none like it


class NotInForce(Exception):
    """A test took out a row that was not in force in its engine."""


def revert(rows: Iterable[str]) -> None:
    """Take rows out of this process, or end it."""
    from kvpatch import activation

    for row in rows:
        try:
            done, why = activation.transaction.revert(row), "is patched over"
        except KeyError:
            done, why = False, "is not in force"
        if not done:
            print(f"driver: {row} {why}, and cannot be taken out", flush=True)
            os._exit(NOT_IN_FORCE)


def check(code: int, log: str) -> None:
    """Look at how a process has ended.

    Raises:
        NotInForce: it could not take out a row.
    """
    if code == NOT_IN_FORCE:
        said = [line for line in log.splitlines() if line.startswith("driver: ")]
        raise NotInForce(said[-1] if said else log[-4000:])
