"""The machine: system, interpreter, driver, shared memory."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from kvpatch.doctor.finding import Finding, Topic

TOPIC = Topic("machine")
DRIVER = Path("/proc/driver/nvidia/version")
SHM = Path("/dev/shm")
SMALL_SHM = 1 << 30


def check(settings: Mapping[str, str]) -> list[Finding]:
    """Describe the machine, and report what would prevent vLLM from running."""
    here = (
        f"{platform.system()} {platform.release()} on {platform.machine()}, "
        f"Python {platform.python_version()} ({sys.executable})"
    )
    driver = nvidia_driver()
    return [
        TOPIC.ok(here)
        if sys.platform == "linux"
        else TOPIC.problem(here, "run it on Linux, as vLLM and kvcached need it"),
        TOPIC.ok(f"NVIDIA driver {driver}")
        if driver
        else TOPIC.note("no NVIDIA driver: only the host device can be used"),
        check_shm(),
        *check_command(settings),
    ]


def nvidia_driver(path: Path = DRIVER) -> str | None:
    """Return the version of the kernel's NVIDIA driver, or None without one."""
    try:
        match = re.search(r"Kernel Module\D*(\d+(?:\.\d+)+)", path.read_text())
    except OSError:
        return None
    return match[1] if match else "of unknown version"


def check_shm(folder: Path = SHM) -> Finding:
    """Check the size of shared memory, where vLLM on a GPU allocates its CPU tier."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return TOPIC.warning(f"{folder} cannot be read ({error})")
    what = f"{folder} has {usage.total >> 20} MiB, {usage.free >> 20} MiB free"
    if usage.total < SMALL_SHM:
        remedy = "start the container with a larger one, for example docker run --shm-size 64g"
        what += "; vLLM on a GPU puts the whole CPU tier there"
        return TOPIC.warning(what, remedy)
    return TOPIC.ok(what)


def check_command(settings: Mapping[str, str]) -> list[Finding]:
    """Check whether the ``vllm`` command belongs to this interpreter."""
    command = shutil.which("vllm", path=settings.get("PATH", os.defpath))
    if command is None:
        return []
    try:
        with Path(command).open("rb") as file:
            first = file.readline(512).decode(errors="replace").strip()
        interpreter = first.removeprefix("#!").strip().strip('"')
        # It may be a link into a folder that this user cannot enter, which is an error.
        if not first.startswith("#!") or not Path(interpreter).exists():
            return []
    except OSError:
        return []
    # Not resolved: the interpreters of two environments may be links to the same file.
    if Path(interpreter).parent == Path(sys.executable).parent:
        return [TOPIC.ok(f"the vllm command is {command}")]
    return [
        TOPIC.warning(
            f"the vllm command on the PATH ({command}) runs {interpreter}, not this Python",
            f"run {interpreter} -m kvpatch doctor to examine that one",
        )
    ]
