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
        model, environment = weights_of(run), device.environ(run)
        # A worker of its own, which can be killed alone.
        apart = {"distributed_executor_backend": "mp"}
        arguments = engine_arguments(run) | apart | {"max_model_len": 1024}
        self.reached, self.armed = folder / "reached", folder / "armed"
        super().__init__(
            model,
            arguments,
            environment,
            folder,
            python=python_of(run.vllm),
            job=job | {"reached": str(self.reached)},
        )
        self._start()

    def from_tiers(self) -> int:
        """Return the prompt tokens that came from the tiers so far; 0 when it does not answer."""
        with suppress(httpx.HTTPError):
            return int(self.metric("vllm:external_prefix_cache_hits_total"))
        return 0

    def process_of(self, role: str) -> psutil.Process:
        """Return the process of a role."""
        if role == "API server":
            return psutil.Process(self.process.pid)
        own = [one for one in self.processes() if not is_tracker(one)]
        below = {one.ppid(): one for one in own}
        engine = below.get(self.process.pid)
        worker = below.get(engine.pid) if engine else None
        if engine is None or worker is None or len(own) != 3:
            raise HarnessError(f"not an engine with one worker: {own}")
        return engine if role == "engine" else worker

    def end_alone(self, seconds: float) -> float | None:
        """Wait for its processes to end by themselves; the seconds it took, or None."""
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            if not self.processes():
                return round(time.monotonic() - begun, 1)
            time.sleep(0.05)
        return None

    def close(self) -> float | None:
        """End what still runs, as a service manager does: SIGTERM, and SIGKILL for who stays.

        Returns:
            Seconds until all had ended by SIGTERM, None when that was not enough.
        """
        self.client.close()
        for one in self.processes():
            with suppress(psutil.Error):
                one.terminate()
        ended = self.end_alone(TERM_SECONDS)
        while left := self.processes():
            for one in left:
                with suppress(psutil.Error):
                    one.kill()
            time.sleep(0.05)
        self.process.wait(10)
        return ended


def is_tracker(one: psutil.Process) -> bool:
    """Whether it is multiprocessing's own, which cleans up after its parent."""
    return "multiprocessing" in " ".join(one.cmdline())


class Load:
    """Prompts, and whether the answers are plain vLLM's tokens."""

    def __init__(self, server: Served, asked: list[list[int]], truth: list[list[int]]) -> None:
        self._server, self._asked, self._truth = server, asked, truth
        self._stop = threading.Event()
        self.right = self.failed = 0
        self.wrong: list[dict[str, Any]] = []

    def ask(self, source: random.Random) -> None:
        """Ask for a prompt at random, and compare."""
        index = source.randrange(len(self._asked))
        count = source.randrange(1, LONGEST + 1)
        try:
            prompt = {"tokens": self._asked[index], "max_tokens": count}
            found = self._server.complete(prompt)["tokens"]
        except (httpx.HTTPError, KeyError, ValueError):
            self.failed += 1  # it was killed, and says so
            self._stop.wait(0.05)
            return
        if found == self._truth[index][:count]:
            self.right += 1
        else:
            self.wrong.append(
                {"prompt": index, "tokens": found, "plain": self._truth[index][:count]}
            )

    @contextmanager
    def running(self, seed: int) -> Iterator[None]:
        """Ask from several threads while the block runs."""

        def run(source: random.Random) -> None:
            while not self._stop.is_set():
                self.ask(source)

        with ThreadPoolExecutor(TOGETHER) as pool:
            asking = [
                pool.submit(run, random.Random(seed * TOGETHER + index))
                for index in range(TOGETHER)
            ]
            try:
                yield
            finally:
                self._stop.set()
        for one in asking:
            one.result()


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

    def run_of(self) -> Run:
        """Return the engine: device and CPU tier too small for the load, the disk behind them."""
        environment = (
            ("PYTHONHASHSEED", "0"),
            ("KVPATCH_STATUS_DIR", ""),  # in /dev/shm, as an operator's
            ("TMPDIR", str(self.folder)),
        )
        return Run(tiers=(str(self.disk),), cpu_blocks=40, blocks=64, environment=environment)

    def serve(self) -> None:
        """Kill one after the other; the last one ends in order."""
        killed: Kill | None = None
        for number in range(len(self.plan) + 1):
            moment, role = self.plan[number] if number < len(self.plan) else (ANY, "")
            job: dict[str, Any] = {}
            if moment != ANY:
                job = {"point": moment, "nth": self.source.randrange(1, LATEST + 1)}
            server = Served(self.folder / f"{number}", self.run_of(), self.device, job)
            try:
                while not server.ready():
                    time.sleep(0.05)
                load = Load(server, self.asked, self.truth)
                if killed is not None:
                    self.account(killed, server, load)
                if not role:
                    return
                killed = self.kill(server, load, number, moment, role) | job
                killed["others_ended_after"] = server.end_alone(ALONE_SECONDS)
            finally:
                terminated = server.close()
            if killed["others_ended_after"] is None:
                killed["others_terminated_after"] = terminated
            self.before = listed()
            self.clean_disk()
            self.kills.append(killed)

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
        started = server.start_seconds or 0.0
        left = self.before & listed()
        running = {process.pid for process in server.processes()}
        killed["left_in_shm"] = sorted(map(kind_of, left))
        killed["charged_bytes"] = sum(
            size for pid, size in usage_of(self.folder).items() if pid not in running
        )
        killed["partial_files"] = len(list(self.disk.rglob("*.tmp")))
        for name in left:
            (SHARED / name).unlink(missing_ok=True)  # so that it is counted once
        for _ in range(CHECKS):
            load.ask(self.source)
        killed["next"] = {
            "start_seconds": round(started, 1),
            "right": load.right,
            "failed": load.failed,
            "from_tiers": server.from_tiers(),
        }
        killed["wrong"] = [*killed["wrong"], *load.wrong]
        load.wrong.clear()
        load.right = load.failed = 0
        others = ended(killed)
        self.say(
            f"{len(self.kills)} of {len(self.plan)}: {killed['killed']}, {killed['moment']}"
            f"{'' if killed['reached'] else ' (not reached)'}; others ended {others}; "
            f"next in {started:.1f} s: "
            f"{killed['next']['right']} right, {len(killed['wrong'])} wrong, "
            f"{killed['next']['from_tiers']} tokens from the tiers; "
            f"left: {', '.join(killed['left_in_shm']) or 'nothing'}"
        )

    def clean_disk(self) -> None:
        """Remove some of the block files, so that there is something to write."""
        for file in sorted(self.disk.rglob("*.bin")):
            if self.source.random() < CLEANED:
                file.unlink()


def ended(killed: Kill) -> str:
    """Return how the other processes of a killed one ended."""
    if killed["others_ended_after"] is not None:
        return f"by themselves after {killed['others_ended_after']} s"
    if killed["others_terminated_after"] is not None:
        return f"by SIGTERM after {killed['others_terminated_after']} s"
    return f"by SIGKILL after {TERM_SECONDS:.0f} s"


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
        "not_reached": sum(not one["reached"] for one in kills),
        "answers": sum(one["right"] + one["next"]["right"] for one in kills),
        "answers_of_successors": sum(one["next"]["right"] for one in kills),
        "wrong_answers": sum(len(one["wrong"]) for one in kills),
        "tokens_from_tiers_of_successors": sum(one["next"]["from_tiers"] for one in kills),
        "left_in_shm": dict(Counter(name for one in kills for name in one["left_in_shm"])),
        "charged_bytes": sum(one["charged_bytes"] for one in kills),
        "partial_files_at_most": max(one["partial_files"] for one in kills),
        "others_ended": dict(Counter(ended(one).rpartition(" after")[0] for one in kills)),
        "longest_start_seconds": max(one["next"]["start_seconds"] for one in kills),
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
