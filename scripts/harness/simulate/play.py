"""What users, operators, neighbours and faults do: chosen by a seed."""

import random
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.simulate import disks, pools
from harness.simulate.invariants import Violation
from harness.simulate.world import Mode, World

Do = Callable[[World, int], None]


@dataclass(frozen=True)
class Operation:
    """One thing that can happen.

    Attributes:
        weight: how often it is chosen.
        top: its number is below this.
        do: what happens, by the number.
    """

    weight: float
    top: int
    do: Do


def _burst(world: World, number: int) -> None:
    for index in range(4):
        world.add(number + index, number // 8)


def _tide(world: World, number: int) -> None:
    """Take the memory away from requests of which a half has been loaded."""
    world.set_neighbour(0)
    several = [number + 2 * index for index in range(4)]
    _until_done(world)
    for index in several:
        world.add(index, 0, half=True)
    _until_done(world)
    world.reset(False, False)
    for worker in world.workers:
        worker.speed = 0.1
    for index in several:
        world.add(index, number // 8)
    for _ in range(2 + number % 3):
        world.step()
    world.set_neighbour(world.mode.pages)


def _until_done(world: World) -> None:
    for _ in range(60):
        if not world.requests:
            break
        world.step()


def _steps(world: World, number: int) -> None:
    for _ in range(1 + number % 12):
        world.step()


def _worker(world: World, number: int) -> Any:
    return world.workers[number % len(world.workers)]


def _ends(world: World, number: int) -> None:
    _worker(world, number).end_some(1 + number // 2 % 3)


def _speed(world: World, number: int) -> None:
    _worker(world, number).speed = (0.05, 0.05, 0.4, 0.9)[number // 2 % 4]


def _lose(world: World, number: int) -> None:
    _worker(world, number).loses = (0.0, 0.3, 0.8)[number // 2 % 3]


def _see(world: World, number: int) -> None:
    _worker(world, number).look_again()


def _ahead(world: World, number: int) -> None:
    worker = _worker(world, number)
    if worker.queue:
        worker.execute()


def _cap(world: World, number: int) -> None:
    world.pool.max_cached_blocks = (0, 3, 8, -1)[number % 4]


def _fault(world: World, number: int) -> None:
    faults = (None, None, *disks.FAULTS)
    disks.FAULTY.fault = faults[number % len(faults)]


def _hang(world: World, number: int) -> None:
    world.disk.hangs = not world.disk.hangs


def _clock(world: World, number: int) -> None:
    world.clock += (0.0, 1.0, 60.0)[number % 3]  # monotonic
    world.wall += (-3600.0, -1.0, 3600.0)[number // 3 % 3]


def _pool(world: World) -> pools.Pool:
    assert world.host_pool is not None
    return world.host_pool


def _exhaust(world: World, number: int) -> None:
    world.exhausts = (0.0, 0.0, 0.2)[number % 3]


OPERATIONS: dict[str, Operation] = {
    "a request comes": Operation(10, 320, lambda w, n: w.add(n % 8, n // 8)),
    "a burst comes": Operation(1, 320, _burst),
    "memory goes under loads": Operation(1, 320, _tide),
    "the engine steps": Operation(22, 12, _steps),
    "a request is aborted": Operation(1.5, 8, lambda w, n: w.abort(n)),
    "copies end": Operation(3, 6, _ends),
    "copies get slow or fast": Operation(1.5, 8, _speed),
    "reports get lost": Operation(0.7, 6, _lose),
    "lost reports are seen": Operation(1, 2, _see),
    "reports are repeated": Operation(1, 1, lambda w, n: w.repeat_reports()),
    "a worker runs ahead": Operation(2, 2, _ahead),
    "the limit moves": Operation(1.5, 9, lambda w, n: w.set_limit(n)),
    "a neighbour moves": Operation(1.5, 6, lambda w, n: w.set_neighbour(n)),
    "memory is exhausted": Operation(0.7, 3, _exhaust),
    "the cap moves": Operation(1, 4, _cap),
    "the cache is reset": Operation(0.7, 4, lambda w, n: w.reset(bool(n & 1), bool(n & 2))),
    "the disk answers": Operation(2, 4, lambda w, n: w.disk.work(n + 1)),
    "the disk hangs or wakes": Operation(0.5, 1, _hang),
    "the disk fails": Operation(1, 6, _fault),
    "a file is damaged": Operation(
        1, 5, lambda w, n: w.disk.damage(disks.DAMAGES[n % len(disks.DAMAGES)])
    ),
    "the clock steps": Operation(1, 9, _clock),
    "a plan fails": Operation(0.2, 1, lambda w, n: w.fail_plan()),
}
# Of worlds with a host pool, besides.
POOL_OPERATIONS: dict[str, Operation] = {
    "the keeper looks": Operation(4, 3, lambda w, n: _pool(w).look(n + 1)),
    "the pool's limit moves": Operation(1.5, 7, lambda w, n: _pool(w).set_limit(n)),
    "a neighbour of the pool moves": Operation(3, 6, lambda w, n: _pool(w).neighbour_moves(n)),
}
LIMIT = 15  # seconds of the processor for a world; most need 0.2
EVERY = OPERATIONS | POOL_OPERATIONS


@dataclass
class Played:
    """What came of a seed.

    Attributes:
        seed: of the world.
        mode: of the engine.
        counts: what happened in them.
        what: the violation of an invariant, if one did not hold.
        log: the operations, the last of them last.
    """

    seed: int
    mode: Mode
    counts: dict[str, int] = field(default_factory=dict)
    what: str = ""
    log: list[str] = field(default_factory=list)


def _too_long(number: int, frame: Any) -> None:
    where = " < ".join(entry.name for entry in reversed(traceback.extract_stack(frame)[-8:]))
    raise Violation("ends", f"no end after {LIMIT} s in {where}")


def play(seed: int, operations: int, model: str, folder: Path, kind: str | None = None) -> Played:
    """Play a seed: the same operations and choices whenever it is played.

    Args:
        seed: what everything follows.
        operations: how many happen before everything is let to its end.
        model: the folder of a model, for its configuration.
        folder: for files.
        kind: of the connector; by the seed if None.
    """
    played = Played(seed, Mode.of(seed, kind))
    source = random.Random(f"play {seed}")
    known = EVERY if played.mode.pooled else OPERATIONS
    weights = [operation.weight for operation in known.values()]
    world = None
    # The engine's own loops, too, have to end: seconds of the processor, not of the clock.
    signal.signal(signal.SIGVTALRM, _too_long)
    # Again each second: a hook of kvpatch's whose errors are reported may have this one as its own.
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT, 1)
    try:
        world = World(seed, played.mode, model, folder)
        for _ in range(operations):
            name = source.choices(list(known), weights)[0]
            number = source.randrange(known[name].top)
            played.log.append(f"{name} ({number})")
            perform(world, name, number)
        played.log.append("everything ends")
        perform(world, "", 0)
    except Violation as found:
        played.what = str(found)
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if world is not None:
            played.counts = dict(world.counts)
            try:
                world.close()
            except Exception:
                if not played.what:
                    raise
    return played


def perform(world: World, name: str, number: int) -> None:
    """Do one operation, or let everything end if it has no name.

    Raises:
        Violation: an invariant does not hold, or the engine raised an error.
    """
    try:
        if name:
            EVERY[name].do(world, number)
            world.check()
        else:
            world.finish()
    except Violation:
        raise
    except Exception as error:
        if world.found is not None:  # what was wrong before the engine noticed
            raise world.found from error
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise Violation(
            "alive", f"{type(error).__name__}: {error} in {where.name} ({where.lineno})"
        ) from error
