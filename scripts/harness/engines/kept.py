"""What engines answer that does not depend on what is tested, kept by all that it depends on.

Beside the environment of a release, as vLLM's own cache is, and made once: other processes that
want the same wait for it.
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import kvpatch
from harness import ROOT, processes
from harness.engines.runs import Finished, Run, cache_of, run_driver

# Of an engine's environment: what vLLM and its libraries read. Where things lie is no part of it.
READ = (*processes.OURS, "MKL", "OMP", "ONEDNN", "TORCH")
PINS = ROOT / "scripts/pins.txt"
# Hours without use after which what is kept goes; a truth has hundreds of megabytes.
UNUSED = {".npz": 4, ".json": 7 * 24, ".lock": 7 * 24}


def is_plain(run: Run) -> bool:
    """Whether nothing of kvpatch's is in an engine; offloading without it needs its device."""
    return not (run.kvpatch or run.offload)


def digest_of(*files: Path) -> str:
    """A digest of what files hold, whatever folder they are in."""
    total = hashlib.sha256()
    for file in sorted(files):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.name} {content}\n".encode())
    return total.hexdigest()


@lru_cache
def model_digest(folder: str) -> str:
    return digest_of(*(file for file in Path(folder).rglob("*") if file.is_file()))


@lru_cache
def drivers() -> str:
    """A digest of the harness, with the drivers and the recipes of models and loads."""
    harness = Path(processes.__file__).parent
    return digest_of(*harness.glob("*.py"), *harness.glob("engines/*.py"))


@lru_cache
def ours() -> str:
    """A digest of kvpatch's code, of C++ too."""
    found = Path(kvpatch.__file__).parent.rglob("*")
    return digest_of(*(file for file in found if file.suffix in (".py", ".cpp", ".h")))


@lru_cache
def installed(vllm: str) -> list[str]:
    """The distributions of a release's environment, which is in front of this one."""
    prefixes = {cache_of(release).parent for release in ("", vllm)}
    pattern = "lib/python3*/site-packages/*.dist-info"
    found = [one for prefix in prefixes for one in prefix.glob(pattern)]
    return sorted(str(Path(*one.parts[-3:])) for one in found)


@lru_cache
def processor() -> str:
    """What kernels are chosen by."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def without_folders(value: Any) -> Any:
    """A job in which the content of models stands for their folders."""
    if isinstance(value, Mapping):
        return {name: without_folders(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(one) for one in value]
    if isinstance(value, str) and value.startswith("/") and Path(value).is_dir():
        return model_digest(str(Path(value).resolve()))
    return value


def key_of(run: Run, job: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """All that an engine's answers depend on, in one word."""
    read = {
        name: value
        for name, value in environment.items()
        if name.startswith(READ) and not value.startswith("/")
    }
    parts = [
        dataclasses.asdict(run),
        without_folders(job),
        read,
        drivers(),
        PINS.read_text(),
        installed(run.vllm),
        processor(),
        ours() if run.kvpatch else "",
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


def make_room(folder: Path) -> None:
    """Remove what nobody has used for long: that of other code."""
    for old in folder.iterdir():
        with suppress(FileNotFoundError):  # somebody else does it too
            if old.stat().st_mtime < time.time() - UNUSED[old.suffix] * 3600:
                old.unlink()


@contextmanager
def entry(name: str, vllm: str) -> Iterator[tuple[Path, Path]]:
    """Where something is kept, and where it is to be made if it is not there; one at a time."""
    folder = cache_of(vllm) / "kept"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    partial = folder / f"{os.getpid()}-{name}"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield path, partial
            if partial.exists():
                make_room(folder)
                partial.rename(path)
            if path.exists():
                os.utime(path)
        finally:
            partial.unlink(missing_ok=True)


def drive(run: Run, job: dict[str, Any], environment: dict[str, str], folder: Path) -> Finished:
    """Run the driver on a job, as ``run_driver`` does; what plain vLLM answers is kept."""
    if not is_plain(run):
        return run_driver(job, environment, folder, vllm=run.vllm)
    with entry(f"{key_of(run, job, environment)}.json", run.vllm) as (path, partial):
        if path.exists():
            return Finished(**json.loads(path.read_text()))
        ended = run_driver(job, environment, folder, vllm=run.vllm)
        if ended.code == 0:
            partial.write_text(json.dumps(dataclasses.asdict(ended)))
        return ended
