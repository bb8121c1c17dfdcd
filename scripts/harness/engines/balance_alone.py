"""``kvpatch balance`` for some engines: by itself it moves the memory of all that run."""

import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvpatch import claims
from kvpatch.control import protocol

_BALANCE = """
import sys
from pathlib import Path
from kvpatch import claims, cli
claims.BASE = Path(sys.argv[1])
sys.exit(cli.main(["balance", *sys.argv[2:]]))
"""


@contextmanager
def command_for(names: Iterable[str]) -> Iterator[list[str]]:
    """Make the command for the engines of these kvcached names alone, without its options."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:  # short enough for sockets
        folder = Path(base, protocol.folder().relative_to(claims.BASE))
        folder.mkdir(mode=0o700)
        for path in map(protocol.path_of, names):
            (folder / path.name).symlink_to(path)
        yield [sys.executable, "-c", _BALANCE, base]
