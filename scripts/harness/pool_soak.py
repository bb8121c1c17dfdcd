"""scripts/soak-pool: two engines of one host pool with random loads, limits and kill -9.

    .venv/bin/python scripts/soak-pool --minutes 60

After each step the kernel's count of their CPU tiers is compared with the pool's limit; the result
has the most that it was exceeded by.
"""

import fcntl
import os
import random
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from harness import console
from harness.engines.pools import Pooled
from harness.engines.runs import Device, Run, block_bytes, prompts
from kvpatch.environ import HOST_POOL
from kvpatch.pool import ledger

NAME = f"soak{os.getpid()}"
MIB = 1 << 20
SIZE = 96 * MIB
LIMITS = (24 * MIB, 48 * MIB, SIZE)
CONVERSATIONS = 30  # whose prompts are drawn, the earlier ones more often


def soak(folder: Path, minutes: float) -> dict[str, float]:
    """Run the engines for so long; return what was done and seen."""
    source, device = random.Random(1), Device(folder / "device")
    device.folder.mkdir()
    known = prompts(CONVERSATIONS, seed=4000)
    weights = [1 / (index + 1) ** 0.6 for index in range(CONVERSATIONS)]
    run = Run(
        environment=((HOST_POOL.name, f"{SIZE}@{NAME}"),), cpu_blocks=SIZE // block_bytes(Run())
    )
    home = ledger.home(NAME)
    started: list[Pooled] = []

    def start() -> Pooled:
        started.append(Pooled(device, folder / f"engine{len(started)}", run, watch=False))
        return started[-1]

    counts = {"kills": 0, "limits": 0, "rounds": 0}
    over: list[int] = []
    began = time.monotonic()
    try:
        engines = [start(), start()]
        while time.monotonic() - began < minutes * 60:
            what, which = source.random(), source.randrange(2)
            if what < 0.15:
                engines[which].kill()
                counts["kills"] += 1
                over.append(overrun(home))
                engines[which] = start()
            elif what < 0.3:
                ledger.set_limit(home, source.choice(LIMITS))
                counts["limits"] += 1
            else:
                engines[which].do("burst", source.choices(known, weights, k=8))
                counts["rounds"] += 1
            over.append(overrun(home))
        for one in engines:
            one.end()
    finally:
        for one in started:
            one.kill()
    return {
        **counts,
        "looks": len(over),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "bytes_over_the_size": max(over),
    }


def overrun(home: Path) -> int:
    """Return by how much the tiers of a pool's engines exceed its size, by the kernel's count.

    The lock of the folder keeps every engine from taking more while it is counted.
    """
    file = os.open(home, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        limit = ledger.read_limit(home)
        size = sum(tiers(home).values())
    finally:
        os.close(file)
    return size - limit.configured if limit is not None and size > limit.configured else 0


def tiers(home: Path) -> dict[tuple[int, int], int]:
    """Return the bytes of every tier whose process has a record in a folder, by its file."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            links = {path: str(path.readlink()) for path in process.glob("fd/*")}
            if any(link.startswith(f"{home}/") for link in links.values()):
                for path, link in links.items():
                    if link.startswith("/dev/shm/vllm_offload_"):
                        stat = path.stat()
                        found[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return found


def main() -> int:
    """Run and print; the exit status is 1 if the pool was ever too large."""
    parser = console.parser("scripts/soak-pool", __doc__ or "")
    parser.add_argument("--minutes", type=float, default=60, help="default: %(default)s")
    options = parser.parse_args()
    return console.run(console.Screen("soak-pool"), lambda: report(options.minutes))


def report(minutes: float) -> int:
    """Run the engines and print what was found."""
    with tempfile.TemporaryDirectory(prefix="kvpatch-soak-") as name:
        found = soak(Path(name), minutes)
    print(found, flush=True)
    return 1 if found["bytes_over_the_size"] else 0
