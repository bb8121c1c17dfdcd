"""kill -9 of the engine, of its worker or of the API server alone, under load, again and again.

    python -m harness.kills                     100 kills
    python -m harness.kills --kills 4           a few
    python -m harness.kills --seed 5            another sequence
    python -m harness.kills --report FILE       write the figures there, as JSON

Plain vLLM generates the tokens of all prompts first. Then ``vllm serve`` with a CPU tier and a
disk behind it serves prompts at random until it is killed: in the middle of a copy to or from the
CPU tier, of a block file, before a file gets its name, before one is read, or at any moment. The
next one starts on the same disk. Every token must be plain vLLM's, nothing may stay charged to the
device, and nothing may be left in /dev/shm after the successor started, but for what ``LEFT``
names, which the report counts.

/dev/shm is one of this run's own, so that what lies there is of its engines.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from harness import console, namespaces, provenance
from harness.console import HarnessError
from harness.engines import kept, kill_points, process
from harness.engines.runs import (
    BLOCK,
    Device,
    Run,
    engine_arguments,
    model_of,
    python_of,
    related,
    weights_of,
)
from harness.engines.serving import Forked
from harness.serve import workspace
from kvpatch.environ import HOST_DEVICE_DIR
from kvpatch.hostdevice import ledger
from kvpatch.verify.child import adopt_orphans

ROLES = ("engine", "worker", "API server")
ANY = "any moment"
MOMENTS = (*kill_points.POINTS, ANY)
LATEST = 40  # the latest pass through a point
PROMPTS = 48
LONGEST = 8  # tokens a request generates at most
TOGETHER = 4
CHECKS = 8  # prompts that a successor is asked before anything else
CLEANED = 0.3  # of the block files, removed after a kill as an operator's clean-up does
REACH_SECONDS = 20.0  # until a point is given up
ALONE_SECONDS = 15.0  # for the others of a killed process to end by themselves
TERM_SECONDS = 20.0  # for those that do not, until SIGTERM is not enough
# What a process that was killed leaves in /dev/shm beyond its successor's start, and why.
LEFT = {
    "kvpatch-status-*/*.page": "kvpatch: the page of the dead, for kvpatch status; swept later",
}
SHARED, SHARED_BYTES = Path("/dev/shm"), 2 << 30

Kill = dict[str, Any]


def plain(device: Device, folder: Path, asked: list[list[int]]) -> list[list[int]]:
    """Return the tokens that plain vLLM generates for each prompt, one at a time."""
    wanted = Run(kvpatch=False, offload=False, blocks=200, together=1, rounds=())
    job = {
        "model": str(model_of("llama")),
        "engine": engine_arguments(wanted),
        "rounds": [[{"tokens": tokens, "max_tokens": LONGEST} for tokens in asked]],
    }
    folder.mkdir()
    ended = kept.drive(wanted, job, device.environ(wanted), folder)
    return [one["tokens"] for one in ended.round(0)]


class Served(Forked):
    """One server as a fork, which stops at a point, from its start to the end of its last process.

    Attributes:
        reached: the file in which a process that has stopped writes its id.
        armed: passes through the point count from when this file is there.
    """

    def __init__(self, folder: Path, run: Run, device: Device, job: dict[str, Any]) -> None:
        folder.mkdir()
        # A worker of its own, which can be killed alone.
        apart = {"distributed_executor_backend": "mp", "max_model_len": 1024}
        self.reached, self.armed = folder / "reached", folder / "armed"
        super().__init__(
            weights_of(run),
            engine_arguments(run) | apart,
            device.environ(run),
            folder,
            python=python_of(run.vllm),
            job=job | {"reached": str(self.reached)},
        )
        self._start()

    def process_of(self, role: str) -> psutil.Process:
        """Return the process of a role."""
        if role == "API server":
            return psutil.Process(self.process.pid)
        # multiprocessing's own cleans up after its parent.
        own = [one for one in self.processes() if "multiprocessing" not in " ".join(one.cmdline())]
        below = {one.ppid(): one for one in own}
        engine = below.get(self.process.pid)
        worker = below.get(engine.pid) if engine else None
        if engine is None or worker is None or len(own) != 3:
            raise HarnessError(f"not an engine with one worker: {own}")
        return engine if role == "engine" else worker

    def end_alone(self, seconds: float) -> None:
        """Wait for its processes to end by themselves, at most so long."""
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)

    def close(self) -> None:
        """End what still runs, as a service manager does: SIGTERM, and SIGKILL for who stays."""
        self.client.close()
        for one in self.processes():
            with suppress(psutil.Error):
                one.terminate()
        self.end_alone(TERM_SECONDS)
        while left := self.processes():
            for one in left:
                with suppress(psutil.Error):
                    one.kill()
            time.sleep(0.05)
        self.process.wait(10)


class Load:
    """Prompts, and whether the answers are plain vLLM's tokens."""

    def __init__(self, server: Served, asked: list[list[int]], truth: list[list[int]]) -> None:
        self._server, self._asked, self._truth = server, asked, truth
        self._stop = threading.Event()
        self.right = 0
        self.wrong: list[dict[str, Any]] = []

    def ask(self, source: random.Random) -> None:
        """Ask for a prompt at random, and compare."""
        index = source.randrange(len(self._asked))
        count = source.randrange(1, LONGEST + 1)
        try:
            prompt = {"tokens": self._asked[index], "max_tokens": count}
            found = self._server.complete(prompt)["tokens"]
        except (httpx.HTTPError, KeyError, ValueError):
            self._stop.wait(0.05)  # it was killed, and says so
            return
        plain = self._truth[index][:count]
        if found == plain:
            self.right += 1
        else:
            self.wrong.append({"prompt": index, "tokens": found, "plain": plain})

    @contextmanager
    def running(self, seed: int) -> Iterator[None]:
        """Ask from several threads while the block runs."""

        def run(number: int) -> None:
            source = random.Random(seed * TOGETHER + number)
            while not self._stop.is_set():
                self.ask(source)

        with ThreadPoolExecutor(TOGETHER) as pool:
            asking = pool.map(run, range(TOGETHER))
            try:
                yield
            finally:
                self._stop.set()
        list(asking)  # raises what one of them did


def listed() -> set[str]:
    """Return the files in /dev/shm."""
    return {str(path.relative_to(SHARED)) for path in SHARED.rglob("*") if not path.is_dir()}


def kind_of(name: str) -> str:
    """Return the name of a file without what is random in it."""
    return re.sub(r"[0-9a-f]{4,}(?:-[0-9a-f]{4,})*|\d+", "*", name)


class Kills:
    """The sequence: a server, a kill, its successor, and so on.

    Args:
        folder: for everything.
        seed: of the order of the kills, their moments and the prompts.
        count: kills.
        say: prints a line.
    """

    def __init__(self, folder: Path, seed: int, count: int, say: Callable[[str], None]) -> None:
        self.folder, self.seed, self.say = folder, seed, say
        self.source = random.Random(seed)
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.device = Device(folder)
        self.asked = related(random.Random(1), PROMPTS, 4 * BLOCK, 18 * BLOCK)
        say("tokens of plain vLLM")
        self.truth = plain(self.device, folder / "plain", self.asked)
        every = [(moment, role) for role in ROLES for moment in MOMENTS]
        self.source.shuffle(every)
        self.plan = [every[index % len(every)] for index in range(count)]
        self.kills: list[Kill] = []
        # Device and CPU tier too small for the load, the disk behind them.
        environment = (
            ("PYTHONHASHSEED", "0"),
            ("KVPATCH_STATUS_DIR", ""),  # in /dev/shm, as an operator's
            ("TMPDIR", str(folder)),
        )
        disk = str(self.disk)
        self.run = Run(tiers=(disk,), cpu_blocks=40, blocks=64, environment=environment)

    def serve(self) -> None:
        """Kill one after the other; the last one ends in order."""
        for number, (moment, role) in enumerate([*self.plan, (ANY, "")]):
            job: dict[str, Any] = {}
            if moment != ANY:
                job = {"point": moment, "nth": self.source.randrange(1, LATEST + 1)}
            server = Served(self.folder / f"{number}", self.run, self.device, job)
            try:
                while not server.ready():
                    time.sleep(0.05)
                load = Load(server, self.asked, self.truth)
                if self.kills:
                    self.account(self.kills[-1], server, load)
                if role:
                    killed = self.kill(server, load, number, moment, role)
                    server.end_alone(ALONE_SECONDS)
            finally:
                server.close()
            if role:
                self.kills.append(killed | job)
                self.before = listed()
                self.clean_disk()

    def kill(self, server: Served, load: Load, number: int, moment: str, role: str) -> Kill:
        """Kill a process of a server under load, at a moment."""
        target = server.process_of(role)
        with load.running(self.seed * 1000 + number):
            server.armed.touch()
            limit = REACH_SECONDS if moment != ANY else self.source.random() * 2
            deadline = time.monotonic() + limit
            while not server.reached.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            stopped = int(server.reached.read_text()) if server.reached.exists() else None
            target.send_signal(signal.SIGKILL)
            if stopped not in (None, target.pid):
                os.kill(int(stopped or 0), signal.SIGCONT)
        return {
            "killed": role,
            "moment": moment,
            "reached": stopped is not None or moment == ANY,
            "right": load.right,
            "wrong": load.wrong,
        }

    def account(self, killed: Kill, server: Served, load: Load) -> None:
        """Note what the killed one left, now that its successor has started, and ask that one."""
        left = self.before & listed()
        running = {process.pid for process in server.processes()}
        usage = usage_of(self.folder).items()
        killed["left_in_shm"] = sorted(map(kind_of, left))
        killed["charged_bytes"] = sum(size for pid, size in usage if pid not in running)
        for name in left:
            (SHARED / name).unlink(missing_ok=True)  # so that it is counted once
        for _ in range(CHECKS):
            load.ask(self.source)
        from_tiers = int(server.metric("vllm:external_prefix_cache_hits_total"))
        killed["next"] = {"right": load.right, "from_tiers": from_tiers}
        killed["wrong"] += load.wrong
        load.wrong, load.right = [], 0
        self.say(
            f"{len(self.kills)} of {len(self.plan)}: {killed['killed']}, {killed['moment']}"
            f"{'' if killed['reached'] else ' (not reached)'}; "
            f"next in {server.start_seconds or 0:.1f} s: {killed['next']['right']} right, "
            f"{len(killed['wrong'])} wrong, {from_tiers} tokens from the tiers; "
            f"left: {', '.join(killed['left_in_shm']) or 'nothing'}"
        )

    def clean_disk(self) -> None:
        """Remove some of the block files, so that there is something to write."""
        for file in sorted(self.disk.rglob("*.bin")):
            if self.source.random() < CLEANED:
                file.unlink()


def usage_of(folder: Path) -> dict[int, int]:
    """Return the bytes that processes have mapped of the device in ``folder``."""
    os.environ[HOST_DEVICE_DIR.name] = str(folder)
    return ledger.usage()


def bad(killed: Kill) -> bool:
    """Whether a kill has shown a fault."""
    unknown = [name for name in killed["left_in_shm"] if name not in LEFT]
    unserved = not killed["next"]["right"]
    return bool(killed["wrong"] or unknown or killed["charged_bytes"] or unserved)


def totals(kills: list[Kill]) -> dict[str, Any]:
    """Return the sums of a report."""
    return {
        "kills": len(kills),
        "of": dict(Counter(one["killed"] for one in kills)),
        "at": dict(Counter(one["moment"] for one in kills if one["reached"])),
        "answers": sum(one["right"] + one["next"]["right"] for one in kills),
        "answers_of_successors": sum(one["next"]["right"] for one in kills),
        "wrong_answers": sum(len(one["wrong"]) for one in kills),
        "tokens_from_tiers_of_successors": sum(one["next"]["from_tiers"] for one in kills),
        "left_in_shm": dict(Counter(name for one in kills for name in one["left_in_shm"])),
        "charged_bytes": sum(one["charged_bytes"] for one in kills),
    }


def main() -> int:
    """Run the kills; 0 when no token was wrong and nothing was left."""
    parser = console.parser("python -m harness.kills", __doc__ or "")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--report", type=Path, help="write the figures there, as JSON")
    options = parser.parse_args()
    screen = console.Screen("kills")
    return console.run(screen, lambda: run(options, screen.say))


def run(options: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Run the kills and write their figures, also those of a sequence that was broken off."""
    namespaces.own_mounts()
    namespaces.mount_tmpfs(SHARED, SHARED_BYTES)
    adopt_orphans()
    head = provenance.header("python -m harness.kills")
    with workspace() as folder:
        kills = Kills(folder, options.seed, options.kills, say)
        try:
            kills.serve()
        finally:
            process.close_servers()
            done = [one for one in kills.kills if "next" in one]
            if options.report and done:
                found = {"totals": totals(done), "seed": options.seed, "kills": done}
                provenance.write(head | found, options.report)
    print(json.dumps(totals(done), indent=1))
    faults = [one for one in done if bad(one)]
    say(f"{len(faults)} of {len(done)} kills show a fault" if faults else "nothing wrong or left")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
