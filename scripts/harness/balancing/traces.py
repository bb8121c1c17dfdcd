"""Loads of models, from published traces of real services.

coding    Claude Code sessions (callanjfox/kv-cache-tester, ``traces/*.json``): a user waits for an
          answer, thinks or lets a tool run, and asks again with all that was said before
chat      an hour of a chat service (kvcache-ai/Mooncake, ``FAST25-release/traces/
          conversation_trace.jsonl``): requests come when they come
agents    Mooncake's ``synthetic_trace.jsonl``, of public data sets, likewise

They are not in this repository. Lengths, reuse, times and pauses are theirs. Of an hour of a
cluster, some conversations are taken.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

BLOCK = 512  # tokens, as Mooncake has them; eight of those of the coding sessions
SOURCES = {
    "coding": "github.com/callanjfox/kv-cache-tester, traces/, commit 94f6046dfd9c: those sessions "
    "of at most 800,000 bytes and 120,000 tokens that its snapshot has",
    "chat": "github.com/kvcache-ai/Mooncake, FAST25-release/traces, commit 3b5a59413395",
    "agents": "github.com/kvcache-ai/Mooncake, FAST25-release/traces, commit 3b5a59413395",
}
LONGEST_PAUSE = 300.0  # seconds; some users went home


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        keys: its blocks of 512 tokens, each of which stands for all before it too.
        prompt, output: tokens.
        pause: seconds after the answer before it, or after the start.
    """

    keys: tuple[int, ...]
    prompt: int
    output: int
    pause: float = 0.0


Conversation = list[Turn]


def coding(folder: Path, longest: int, seed: int) -> list[Conversation]:
    """Return sessions none of whose requests is longer than ``longest`` tokens."""
    sessions = []
    for number, path in enumerate(sorted(folder.glob("*.json"))):
        session = []
        for one in json.loads(path.read_text())["requests"]:
            if "hash_ids" not in one:
                continue  # of a sub-agent, which is a list of its own
            # The last of eight stands for those before it; ids are of one session each.
            keys = tuple((number << 24) + key for key in one["hash_ids"][7::8])
            pause = min(LONGEST_PAUSE, float(one.get("think_time", 0.0)))
            session.append(Turn(keys, one["in"], max(1, one["out"]), pause))
        if session and max(turn.prompt for turn in session) <= longest:
            sessions.append(session)
    random.Random(seed).shuffle(sessions)
    return sessions


def mooncake(path: Path, longest: int, part: float, seed: int) -> list[tuple[float, Turn]]:
    """Return requests with the seconds at which they come, of a part of the conversations."""
    drawn: dict[int, bool] = {}
    random_ = random.Random(seed)
    found = []
    for line in path.read_text().splitlines():
        one = json.loads(line)
        keys = one["hash_ids"]
        # The first block is the system prompt of all; the second one tells conversations apart.
        first = keys[min(1, len(keys) - 1)]
        if first not in drawn:
            drawn[first] = random_.random() < part
        if drawn[first] and one["input_length"] <= longest:
            full = one["input_length"] // BLOCK
            turn = Turn(tuple(keys[:full]), one["input_length"], max(1, one["output_length"]))
            found.append((one["timestamp"] / 1000, turn))
    return found
