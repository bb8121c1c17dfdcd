"""The memory limit of this process's container: of its cgroup and of every cgroup above it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

PROC, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 62  # cgroup v1 writes no limit as the highest multiple of a page


class Limit(NamedTuple):
    """One memory limit.

    Attributes:
        limit: bytes that may be used.
        free: bytes of it that are free, or used by pages that the kernel can drop.
    """

    limit: int
    free: int


class _Files(NamedTuple):
    """The names of a hierarchy's files, and of the counters in its ``memory.stat``."""

    limit: str
    used: str
    cached: str
    shared: str


_V2 = _Files("memory.max", "memory.current", "file", "shmem")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache", "total_shmem")


def tightest(proc: Path = PROC, root: Path = ROOT) -> Limit | None:
    """Return the limit that leaves the least, or None without one.

    Args:
        proc: the file with the cgroups of a process.
        root: where the cgroups are mounted.
    """
    found = [limit for folder, files in _folders(proc, root) if (limit := _read(folder, files))]
    return min(found, key=lambda limit: limit.free, default=None)


def _folders(proc: Path, root: Path) -> Iterator[tuple[Path, _Files]]:
    """Yield the folders of the process's cgroups, and of those above them.

    In a container without a cgroup namespace the path is the host's, and only the root of the
    mount is there: it is the container's own.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            mount, files = root / "memory", _V1
        elif not controllers:
            mount, files = root, _V2
        else:
            continue
        inside = Path(path.lstrip("/"))
        for one in (inside, *inside.parents):
            yield mount / one, files


def _read(folder: Path, files: _Files) -> Limit | None:
    try:
        limit = int((folder / files.limit).read_text())  # "max" is no number
        used = int((folder / files.used).read_text())
    except (OSError, ValueError):
        return None
    if limit >= _UNLIMITED:
        return None
    counted = _counters(folder / "memory.stat")
    # What tmpfs holds, as /dev/shm, counts as cache and cannot be dropped.
    dropped = counted.get(files.cached, 0) - counted.get(files.shared, 0)
    return Limit(limit, max(0, limit - used + max(0, dropped)))


def _counters(path: Path) -> Mapping[str, int]:
    try:
        pairs = (line.split() for line in path.read_text().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    except (OSError, ValueError):
        return {}
