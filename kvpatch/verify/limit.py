"""kvcached's limit of an engine's memory, moved while it runs."""

from __future__ import annotations

import os
import subprocess
import sys

from kvpatch.environ import SWITCH
from kvpatch.verify.child import Unfinished

# In a process of its own, because nothing of kvcached is imported here. It makes a pool that is
# not there.
_MOVE = """
import sys
from kvcached.cli.utils import get_kv_cache_limit, update_kv_cache_limit
if get_kv_cache_limit(sys.argv[1]) is None:
    sys.exit(1)
update_kv_cache_limit(sys.argv[1], int(sys.argv[2]))
"""


def move(pool: str, size: int) -> None:
    """Set the limit of a pool, in bytes of all layers, as ``kvctl limit`` does; or Unfinished."""
    done = subprocess.run(
        [sys.executable, "-c", _MOVE, pool, str(size)],
        env={**os.environ, SWITCH.name: "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or f"no pool {pool}").splitlines()[-1]
        raise Unfinished(f"kvcached's limit could not be moved: {last}")
