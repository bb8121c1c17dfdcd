"""Folders of tools for one command, made again when what they are made from changes."""

import fcntl
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path


def made(folder: Path, recipe: str, make: Callable[[], object]) -> Path:
    """Return ``folder``, as ``make`` leaves it, made anew unless ``recipe`` is the last one's.

    Another process that wants it meanwhile waits until it is there.
    """
    stamp = folder / "made-from"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != recipe:
            shutil.rmtree(folder, ignore_errors=True)
            make()
            stamp.write_text(recipe)
    return folder


def install(python: str | Path, *arguments: str | Path) -> None:
    """Run ``pip install`` of an environment.

    Raises:
        subprocess.CalledProcessError: it failed; pip has printed why.
    """
    command = [python, "-m", "pip", "install", "-q", *arguments]
    environment = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_PROGRESS_BAR": "off", "KVPATCH": "0"}
    subprocess.run(list(map(str, command)), env=os.environ | environment, check=True)
