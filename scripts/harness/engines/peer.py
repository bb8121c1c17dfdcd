"""One of two CPU tiers that vLLM's tier p2p joins, without engines and without kvpatch.

    python -m harness.engines.peer holder PORT         stores blocks, and serves them
    python -m harness.engines.peer asker PORT HOLDER   asks a holder for them, and stores others

The holder stops stepping once it has answered that it has the blocks, as one does whose step takes
long, until a line of standard input lets it go on. Meanwhile the asker gives up, and stores other
blocks in the same chunks. Each says on standard output how far it is; the asker prints, before and
after the holder has gone on, what its blocks are full of, as JSON.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.engines.tier_classes import BLOCKS, Tiers

ASKED = tuple(range(1, BLOCKS - 1))
OTHERS = tuple(range(101, 101 + BLOCKS))
GIVES_UP = 1.0  # seconds; vLLM's asker waits 30 for a load, and then 10 for the end of it
STEP = 0.002  # seconds between two steps
STEPS = 500  # in which whatever was asked for has been done


def joined(port: str) -> Tiers:
    """Return a CPU tier with the tier p2p behind it, which steps alone and no thread of vLLM's."""
    tier = {"type": "p2p", "host": "127.0.0.1", "port": int(port)}
    return Tiers(Path(), tiers=[tier], extra={"tier_poll_interval_s": 0})


def step(tiers: Tiers, times: int = STEPS) -> None:
    """Step some times, with time for what works beside the steps."""
    for _ in range(times):
        tiers.step()
        time.sleep(STEP)


def say(what: Any) -> None:
    """Tell how far it is, and wait for a line that lets it go on."""
    print(json.dumps(what), flush=True)
    sys.stdin.readline()


def hold(port: str) -> None:
    """Serve blocks, and stall between the answer to a lookup and the next step."""
    tiers = joined(port)
    tiers.store(*ASKED)
    while tiers.manager._jobs:  # of the store; the tier keeps nothing of its own
        step(tiers, 1)
    print(json.dumps("stored"), flush=True)
    while not tiers.manager._jobs:  # blocks that it keeps for who asked
        step(tiers, 1)
    say("stalls")
    step(tiers)
    say("went on")


def ask(port: str, holder: str) -> None:
    """Load blocks of a holder that stalls, and then store others."""
    from vllm.v1.kv_offload.tiering.p2p.session import client

    client._LOAD_TIMEOUT_S = client._ABORT_ACK_TIMEOUT_S = GIVES_UP / 2
    tiers = joined(port)
    source = {"kv_request_id": "a request", "remote_host": "127.0.0.1", "remote_port": int(holder)}
    context = tiers.request(kv_transfer_params={"remote_kv_source": source})
    while tiers.answered(context, ASKED) is None:
        step(tiers, 1)
    tiers.store(*OTHERS)
    say(tiers.find(*OTHERS))
    step(tiers)
    say(tiers.find(*OTHERS))


if __name__ == "__main__":
    sides: dict[str, Callable[..., None]] = {"holder": hold, "asker": ask}
    sides[sys.argv[1]](*sys.argv[2:])
