"""The same command without kvpatch and without offloading, and its answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvpatch.environ import DEBUG, KVCACHED_SWITCHES, SWITCH, VERIFY
from kvpatch.verify.api import Answer, Api
from kvpatch.verify.drive import ANSWER, Say
from kvpatch.verify.load import Load

OFFLOADING = ("--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend")


def command_of(command: Sequence[str]) -> list[str]:
    """Return a command without the options that configure offloading."""
    found: list[str] = []
    leave_out = False
    for word in command:
        option, equals, _ = word.partition("=")
        name = option.replace("_", "-")
        ours = word.startswith("--") and (
            name in OFFLOADING or name.startswith(tuple(f"{one}." for one in OFFLOADING))
        )
        if ours:
            leave_out = not equals
        elif leave_out:
            leave_out = False  # the value of the option before
        else:
            found.append(word)
    return found


def environment_of(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with kvpatch and kvcached off."""
    ours = {DEBUG.name, VERIFY.name, *(switch.name for switch in KVCACHED_SWITCHES)}
    kept = {name: value for name, value in environment.items() if name not in ours}
    return kept | {SWITCH.name: "0"}


def answers(
    api: Api, load: Load, conversations: int, say: Say
) -> tuple[list[Answer], list[Answer]]:
    """Return every turn's answers, with the prefix cache and computed: vLLM's noise to itself."""
    every = [
        (conversation, turn) for turn in (1, 2, 3) for conversation in range(1, conversations + 1)
    ]

    def ask(conversation: int, turn: int) -> Answer:
        name = f"conversation {conversation}, turn {turn}"
        return api.complete(name, load.prompt(conversation, turn), ANSWER)

    cached = [ask(*one) for one in every]
    say(f"plain vLLM: {len(cached)} answers")
    computed = []
    for one in every:
        api.reset()
        computed.append(ask(*one))
    say(f"plain vLLM, everything computed again: {len(computed)} answers")
    return cached, computed
