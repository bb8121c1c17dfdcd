"""Why the secondary tier ``p2p`` is refused (KVP364): vLLM's own, over NIXL between two processes.

When this fails, vLLM no longer writes where it must not, and the tier can be looked at again.
"""

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from typing import Any

import pytest

from harness.engines import bucket
from harness.engines.peer import ASKED, OTHERS
from kvpatch.verify.child import free_port


class Peer:
    """One side, which tells how far it is and waits until it may go on."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def told(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # among lines of vLLM's log
            if line.startswith(('"', "[")):
                return json.loads(line)
        raise AssertionError(f"ended with {self.process.wait()}")

    def go_on(self) -> None:
        print(file=self.process.stdin, flush=True)


@pytest.fixture
def peer():
    environment = dict(
        os.environ,
        KVPATCH="0",
        PYTHONHASHSEED="0",
        PYTHONPATH=os.pathsep.join([str(bucket.installed("nixl")), *sys.path]),
        NIXL_LOG_LEVEL="WARN",
    )
    with ExitStack() as started:

        def start(*words: str) -> Peer:
            process = subprocess.Popen(
                [sys.executable, "-m", "harness.engines.peer", *words],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            started.enter_context(process)
            started.callback(process.kill)
            return Peer(process)

        yield start


def test_a_peer_that_stalls_writes_into_memory_that_has_other_blocks_by_then(peer):
    port = str(free_port())
    holder = peer("holder", port)
    assert holder.told() == "stored"
    asker = peer("asker", str(free_port()), port)
    assert holder.told() == "stalls"
    assert asker.told() == list(OTHERS)
    holder.go_on()
    assert holder.told() == "went on"
    asker.go_on()
    found = asker.told()
    assert len(found) == len(OTHERS)  # all are hits
    assert sorted(set(found) - set(OTHERS)) == list(ASKED)
