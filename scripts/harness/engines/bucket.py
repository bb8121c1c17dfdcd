"""A bucket for engines: moto's S3 server and NIXL, in a folder of their own.

The engines' processes see NIXL alone; what the server needs is not theirs.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import ROOT
from harness.console import HarnessError
from harness.matrix import sources
from kvpatch.verify.child import free_port

# Folders, by what is pinned for each.
PINS = {"nixl": ROOT / "scripts/pins-nixl.txt", "s3": ROOT / "scripts/pins-s3.txt"}
STARTING = 60.0  # seconds in which a server has started
BUCKET = "kv-blocks"


def installed(name: str) -> Path:
    """Return the folder of one of ``PINS``, made if it is not there.

    Raises:
        HarnessError: something could not be downloaded.
    """
    mark = hashlib.sha256(PINS[name].read_bytes()).hexdigest()[:12]
    into = sources.cache().with_name("objects") / f"{name}-{mark}"
    if not into.exists():
        into.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=into.parent) as temporary:
            words = ("-m", "pip", "install", "-q", "--no-deps", "--require-hashes")
            made = Path(temporary) / "made"
            asked = [sys.executable, *words, "--target", str(made), "-r", str(PINS[name])]
            done = subprocess.run(asked, stderr=subprocess.PIPE, text=True, check=False)
            if done.returncode:
                raise HarnessError(f"{PINS[name].name}: {done.stderr.strip()[-400:]}")
            if not into.exists():  # another process may have been faster
                made.rename(into)
    return into


class Bucket:
    """A bucket of a running server, or of one that is stopped.

    Attributes:
        url: of the bucket.
        server: its process.
    """

    def __init__(self, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}/{BUCKET}"
        with log.open("wb") as output:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-p", str(port)],
                env=dict(os.environ, PYTHONPATH=str(installed("s3")), KVPATCH="0"),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + STARTING
        while True:
            try:
                self.ask("PUT", "")
                return
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < end, log.read_text()[-2000:]
                time.sleep(0.1)

    def ask(self, method: str, name: str, data: bytes | None = None) -> bytes:
        """Ask the server for an object, or for the list of them without a name."""
        path = f"/{name}" if name and not name.startswith("?") else name
        # An object is its owner's; the server takes anybody for the owner who says who he is.
        asked = urllib.request.Request(
            f"{self.url}{path}", data, {"Authorization": "AWS anybody:anything"}, method=method
        )
        with urllib.request.urlopen(asked, timeout=STARTING) as answer:
            found: bytes = answer.read()
        return found

    def names(self) -> list[str]:
        """Return the names of all objects."""
        listed = self.ask("GET", "?list-type=2").decode()
        return re.findall(r"<Key>([^<]+)</Key>", listed)


@contextmanager
def bucket(log: Path) -> Iterator[Bucket]:
    """Start a server with an empty bucket, and kill it at the end."""
    one = Bucket(free_port(), log)
    try:
        yield one
    finally:
        one.server.kill()
        one.server.wait()
