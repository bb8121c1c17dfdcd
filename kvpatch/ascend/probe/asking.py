"""The processes in which a device is asked, and what their answers come to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from kvpatch import environ
from kvpatch.ascend.probe.questions import QUESTIONS, Answer

SECONDS = 60.0  # for one answer
# What is measured, or never happens with kvpatch, whatever the device does.
TOLD_ONLY = ("times", "unmapped")
RIGHT, WRONG, UNFINISHED = "right", "wrong", "unfinished"
_MARKS = {True: RIGHT, False: WRONG, None: "not asked"}

Asked = Callable[[str, Path, int], Answer]


def in_a_process(name: str, library: Path, device: int) -> Answer:
    """Ask one question in a process that may hang or be ended by the device."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHED")}
    command = [sys.executable, "-m", "kvpatch.ascend.probe.questions", name]
    try:
        done = subprocess.run(
            [*command, str(library), str(device)],
            env=kept | {environ.SWITCH.name: "0", environ.KVCACHED_AUTOPATCH.name: "0"},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(False, f"no answer within {SECONDS:.0f} s")
    try:
        right, words = json.loads(done.stdout.splitlines()[-1])
        return Answer(right, words)
    except (IndexError, ValueError):
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        return Answer(False, f"its process ended with {done.returncode}: {' '.join(last)[:300]}")


def ask(
    library: Path, device: int, say: Callable[[str], None], asked: Asked = in_a_process
) -> dict[str, Answer]:
    """Ask a device every question, and say each answer as it comes."""
    answers = {}
    for name, question in QUESTIONS.items():
        answer = answers[name] = asked(name, library, device)
        mark = "seen" if name in TOLD_ONLY else _MARKS[answer.right]
        say(f"{question.words}: {mark}: {answer.words}")
    return answers


def word(answers: Mapping[str, Answer]) -> str:
    """Return what answers come to; a question that was not asked leaves it open."""
    judged = [answers[name].right for name in QUESTIONS if name not in TOLD_ONLY]
    if False in judged:
        return WRONG
    return UNFINISHED if None in judged else RIGHT
