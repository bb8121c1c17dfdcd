"""Writes which functions of kvpatch and of the harness a process executes, each once.

Where ``HARNESS_EXECUTED`` names a file, every process that has it appends a line for each function
at its first call: its file and its first line. Forks go on with what they inherited; a Python that
is started finds ``recording/sitecustomize.py``. A process that is killed has written what it ran.
"""

import os
import sys
import threading
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import FrameType
from typing import Any

VARIABLE = "HARNESS_EXECUTED"
SITE = Path(__file__).parent / "recording"
STARTUP = "kvpatch_startup.py"  # at the root of a wheel; in the checkout it is in kvpatch/startup
_HARNESS = os.path.realpath(__file__).rsplit("/", 2)[0] + "/"


def source_of(file: str) -> str:
    """Return a file's path in the repository; empty for one that is neither kvpatch's nor ours."""
    name = file.rpartition("/")[2]
    if name == STARTUP:
        return f"kvpatch/startup/{STARTUP}"
    if file.startswith(_HARNESS):
        return f"scripts/harness/{file.removeprefix(_HARNESS)}"
    _, found, inside = file.rpartition("/kvpatch/")
    return f"kvpatch/{inside}" if found and "/scripts/" not in file else ""


_writing = ""  # the file that this process writes, and its threads


def switch(path: Path) -> None:
    """Have this process, and those that it starts from now on, write into another file."""
    os.environ[VARIABLE] = str(path)
    start()


def start() -> None:
    """Begin to write, if this process is asked to."""
    global _writing
    path = os.environ.get(VARIABLE)
    if not path or path == _writing:
        return
    _writing = path
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    sources: dict[str, str] = {}
    seen: set[tuple[str, int]] = set()
    of_function = CO_OPTIMIZED  # an interpreter that ends clears the names of modules first

    def trace(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not code.co_flags & of_function:
            return  # of a module or class, which an import executes
        file = code.co_filename
        if (source := sources.get(file)) is None:
            source = sources[file] = source_of(file)
        if source and (one := (file, code.co_firstlineno)) not in seen:
            seen.add(one)
            # One write, so that the lines of several processes do not mix.
            os.write(descriptor, f"{source}:{code.co_firstlineno}\n".encode())

    threading.settrace(trace)
    sys.settrace(trace)


def add(other: Path) -> None:
    """Add what others wrote elsewhere to what this process writes, if it does."""
    if _writing and other.exists():
        with Path(_writing).open("a") as file:
            file.write(other.read_text())


def read(path: Path) -> set[tuple[str, int]]:
    """Return the functions that were executed: file in the repository, and first line."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = (line.rpartition(":") for line in lines)
    return {(file, int(line)) for file, _, line in found}
