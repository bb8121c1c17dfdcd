"""Whether the startup files are installed, and whether an interpreter runs them."""

from __future__ import annotations

import json
import site
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kvpatch.doctor import interpreter
from kvpatch.doctor.finding import Finding, Level, Topic
from kvpatch.environ import SWITCH

TOPIC = Topic("startup")
NAMES = ("kvpatch-init.pth", "kvpatch-init.start", "kvpatch_startup.py")
SECONDS = 60

# Run with KVPATCH=1: whether kvpatch is loaded without an explicit import.
PROBE = """
import json, sys
waiting = any(type(finder).__module__ == "kvpatch.bootstrap" for finder in sys.meta_path)
broken = any(type(finder).__module__ == "kvpatch_startup" for finder in sys.meta_path)
folder = getattr(sys.modules.get("kvpatch"), "__file__", None)
print(json.dumps({"waiting": waiting, "broken": broken, "file": folder}))
"""


def site_folders() -> list[Path]:
    """Return the folders whose startup files this interpreter reads."""
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders = [*folders, site.getusersitepackages()]
    return [Path(folder) for folder in folders]


def check(settings: Mapping[str, str]) -> list[Finding]:
    """Check the startup files, and start an interpreter to verify that they run."""
    firing = check_firing(sys.executable, settings)
    fires = firing.level is Level.OK
    return [*check_files(site_folders(), fires=fires), firing]


def check_files(
    folders: Iterable[Path], path: Iterable[str] | None = None, fires: bool = False
) -> Iterator[Finding]:
    """Look for the startup files where they are read and, as one that ``fires``, on the path."""
    read = [folder for folder in folders if folder.is_dir()]
    wanted = NAMES[1 if sys.version_info >= (3, 15) else 0]
    for folder in read:
        missing = [name for name in (wanted, NAMES[2]) if not (folder / name).exists()]
        if not missing:
            yield TOPIC.ok(f"{folder / wanted} is in place")
            return
        if len(missing) == 1:
            yield TOPIC.problem(
                f"{folder} has a part of the startup files: {missing[0]} is missing",
                "reinstall kvpatch with pip install --force-reinstall --no-deps kvpatch",
            )
            return
    for entry in sys.path if path is None else path:
        if (Path(entry) / wanted).exists():
            if fires:
                what = "is in place, in a folder that another startup file adds"
                yield TOPIC.ok(f"{Path(entry) / wanted} {what}")
                return
            yield TOPIC.problem(
                f"{Path(entry) / wanted} is in a folder whose startup files Python does not "
                "read, as after pip install --target",
                f"install kvpatch into {read[0] if read else 'site-packages'}, or "
                "import kvpatch before vllm",
            )
            return
    yield TOPIC.problem(
        f"no startup file: {wanted} is in none of {', '.join(map(str, read)) or 'no folder'}",
        "install kvpatch with pip, which puts it there, or import kvpatch before vllm",
    )


def check_firing(python: str, settings: Mapping[str, str]) -> Finding:
    """Start ``python`` with the switch on, and check that kvpatch waits for vllm in it."""
    try:
        done = interpreter.run(python, PROBE, dict(settings) | {SWITCH.name: "1"}, SECONDS)
        answer = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return TOPIC.problem(
            f"{python} failed to run the check of the startup file "
            f"({type(error).__name__}: {error})",
            f"run {python} -c 'import json' to see why",
        )
    if answer["waiting"]:
        return TOPIC.ok(f"it fires in {python} and loads {answer['file']}")
    if answer["broken"]:
        return TOPIC.problem(
            f"it fires in {python} but kvpatch cannot be imported there",
            f"run {python} -c 'import kvpatch' to see why, then reinstall kvpatch",
        )
    return TOPIC.problem(
        f"the startup file does not fire: with {SWITCH}=1, {python} has nothing of kvpatch loaded",
        "install kvpatch into that interpreter's site-packages, start it without -S, or "
        "import kvpatch before vllm",
    )
