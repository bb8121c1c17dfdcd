"""``python -m kvpatch``: the same as the ``kvpatch`` command."""

from __future__ import annotations

import sys

from kvpatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
