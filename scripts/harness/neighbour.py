"""A process beside an engine that has memory of its device; python -m harness.neighbour BYTES.

It charges the device's ledger as one that has mapped pages does, says that it is there, and ends
with its standard input. It imports nothing large: neighbours come and go in a fraction of a second.
"""

import fcntl
import os
import subprocess
import sys

from kvpatch.hostdevice import ledger
from kvpatch.process import start_ticks

HERE = "here\n"


class Neighbour:
    """A running neighbour with so many bytes of the device."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.neighbour", str(size)],
            env=dict(os.environ, KVPATCH="0"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == HERE

    def leave(self, killed: bool = False) -> None:
        """End it; a dead process's charge is dropped by whoever looks next."""
        if killed:
            self._process.kill()
        self._process.communicate()


def charge(size: int) -> None:
    """Charge this process with ``size`` bytes of the device.

    Raises:
        LookupError: the ledger is full.
    """
    with ledger.ledger_path().open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for number in range(ledger._SLOTS):
            at = ledger._HEADER.size + number * ledger._SLOT.size
            file.seek(at)
            if ledger._SLOT.unpack(file.read(ledger._SLOT.size))[0] == 0:
                file.seek(at)
                file.write(ledger._SLOT.pack(os.getpid(), start_ticks(os.getpid()), size))
                return
    raise LookupError("the ledger has no empty slot")


if __name__ == "__main__":
    charge(int(sys.argv[1]))
    sys.stdout.write(HERE)
    sys.stdout.flush()
    sys.stdin.read()
