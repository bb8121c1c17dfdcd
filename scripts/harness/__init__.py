"""What only contributors run: engines on the host device, the demo, benchmarks, the matrix, docs.

An editable install puts ``scripts`` on the path, so that this is ``import harness``. The
commands in ``scripts`` are thin: each runs one module of this package.
"""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# The harness observes kvpatch from outside; an engine that it starts sets this itself.
os.environ.setdefault("KVPATCH", "0")
