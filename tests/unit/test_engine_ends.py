"""How a fork of an engine ends."""

import os
import subprocess
import sys

from harness import ROOT

CODE = """
import atexit
from concurrent.futures import ThreadPoolExecutor
from harness.engines.fork_server import leave

class Left:
    def __del__(self) -> None:
        print("finalized")

left = Left()
left.itself = left
atexit.register(print, "exit handler")
executor = ThreadPoolExecutor(1)
executor.submit(print, "thread").result()
leave()
"""


def test_an_engine_ends_with_an_executor_that_nobody_has_shut_down():
    ended = subprocess.run(
        [sys.executable, "-c", CODE],
        env=os.environ | {"PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["thread", "exit handler"]
