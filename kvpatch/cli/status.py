"""``kvpatch status``: the memory and transfers of running engines."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from kvpatch.cli import verbs
from kvpatch.cli.engines import charged, is_shown, last_suspension, table
from kvpatch.cli.screen import Screen
from kvpatch.environ import seconds
from kvpatch.sizes import readable
from kvpatch.telemetry import reader, refusals, status_page
from kvpatch.telemetry.printable import printable
from kvpatch.telemetry.reader import Seen, State

RECENT = 600.0  # seconds for which a refusal is shown without -v

ELASTIC = {True: "yes", False: "no", None: "not in this process"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pid", type=int, help="one process")
    which.add_argument(
        "--all", action="store_true", help="also other users' engines, which only root can read"
    )
    parser.add_argument(
        "-v", "--verbose", action="store_true", help="every process with all that it tells"
    )
    parser.add_argument("--watch", action="store_true", help="draw it again until q or Ctrl-C")
    parser.add_argument(
        "--interval",
        type=partial(verbs.parsed, seconds),
        default=1.0,
        help="seconds between drawings, 0.1 at least (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON, a line a drawing")
    parser.epilog = (
        "Without options: a line per engine. DEVICE is all that the device is charged for: mapped, "
        "reserved ahead and kvcached's zero page; HELD is a part of mapped; STORE/s and LOAD/s are "
        "bytes to the tier and back; HITS are the sources of prompt tokens; a narrow terminal gets "
        "fewer columns. Ends 0 when an engine, or the process of --pid, "
        "runs, and everything that can be seen from here does; else 1. An engine that ended with "
        "its server is no fault."
    )


def run(options: argparse.Namespace) -> int:
    """Print the status once, or repeatedly with ``--watch``."""
    if options.watch and not options.json and sys.stdout.isatty():
        with Screen() as screen:
            while True:
                head = f"{time.strftime('%H:%M:%S')}  kvpatch status; q quits"
                screen.draw(f"{head}\n\n{drawn(look(options), options)}")
                if screen.quits(max(0.1, options.interval)):
                    return 0
    while True:
        seen = look(options)
        print(drawn(seen, options), flush=True)
        if not options.watch:
            return code(seen, options.pid)
        time.sleep(max(0.1, options.interval))


def look(options: argparse.Namespace) -> list[Seen]:
    """Return what was asked for."""
    return [reader.one(options.pid)] if options.pid else reader.all_of(options.all)


def drawn(seen: list[Seen], options: argparse.Namespace) -> str:
    """Return one drawing."""
    if options.json:
        return as_json(seen)
    return text(seen) if options.verbose or options.pid else overview(seen)


def code(seen: list[Seen], pid: int | None = None) -> int:
    """Return the exit code: 0 if an engine, or ``pid``, runs, and nothing that should does not."""
    here = [one for one in seen if one.state not in (State.FOREIGN, State.ENDED)]
    runs = bool(here) if pid else any(map(is_shown, here))
    return 0 if runs and all(one.state in reader.WELL for one in here) else 1


def as_json(seen: list[Seen]) -> str:
    """Return the status as one line of JSON."""
    processes = [
        {"pid": one.pid, "state": one.state.value, "line": one.line}
        | ({} if one.page is None else {"kvpatch": one.page.kvpatch} | one.page.content)
        for one in seen
    ]
    for process in processes:
        process.pop("refusals", None)
    return json.dumps({"processes": processes, "refusals": refusals.recent()})


def text(seen: list[Seen]) -> str:
    """Return the status as text: one block per process, and the last refusals."""
    told: dict[str, int] = {}
    blocks = [block(one, told) for one in seen] or [nothing()]
    return "\n".join([*blocks, *last_refusals(refusals.recent())])


def overview(seen: list[Seen]) -> str:
    """Return the status as a table, and the refusals of the last minutes."""
    now = time.time()
    recent = [one for one in refusals.recent() if now - one["at"] < RECENT]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    shown = table(seen, width)
    blocks = [shown or (running(seen) if seen else nothing()), *last_refusals(recent)]
    left = [one for one in seen if one.state not in reader.OVER]
    if left and all(one.state is State.FOREIGN and not is_shown(one) for one in left):
        blocks.insert(0, "no process that can be seen from here has kvpatch on")
    return "\n".join(blocks)


def nothing() -> str:
    """Return that there is no page."""
    where = printable(str(status_page.folder_of(os.getuid())))
    return f"no process with kvpatch on publishes in {where}"


def running(seen: list[Seen]) -> str:
    """Return what processes without an engine there are, such as those of one that starts."""
    here = [one for one in seen if one.state in reader.WELL]
    if not here:
        return nothing()
    pids = ", ".join(str(one.pid) for one in here)
    return f"no engine yet: {len(here)} with kvpatch on (pid {pids}); -v says more"


def last_refusals(recent: list[dict[str, Any]]) -> list[str]:
    """Return the block of the last refusals; none without one."""
    if recent:
        lines = [
            f"  {time.strftime('%Y-%m-%d %H:%M', time.localtime(one['at']))} pid {one['pid']}: "
            f"{printable(one['sentence'])}"
            for one in recent
        ]
        return ["last refusals\n" + "\n".join(lines)]
    return []


def block(seen: Seen, told: dict[str, int] | None = None) -> str:
    """Return the lines about one process; ``told`` has the process that was first with features."""
    if seen.state not in reader.WELL or seen.page is None:
        return printable(seen.line)
    content = seen.page.content
    head = (
        f"pid {seen.pid}  {' and '.join(content.get('roles', ()))}  kvpatch {seen.page.kvpatch}, "
        f"{content.get('vllm', '')}, kvcached {content.get('kvcached', '')}; "
        f"KV on elastic memory: {ELASTIC[content.get('elastic')]}"
    )
    features = ", ".join(f"{name} {how}" for name, how in content.get("features", {}).items())
    first = seen.pid if told is None else told.setdefault(features, seen.pid)
    engine = content.get("engine", {})
    lines = [
        *([("state", seen.line)] if seen.line else ()),
        ("features", features if first == seen.pid else f"those of pid {first}"),
        *([("verified", f"here on {date}")] if (date := content.get("verified")) else ()),
        *engine_lines(engine),
    ]
    off = content.get("off") or engine.get("off")
    if off:
        lines.append(("counting", f"off, because of an error of kvpatch's own: {off}"))
    return "\n".join([printable(head), *(f"  {name:<10}{printable(what)}" for name, what in lines)])


def engine_lines(engine: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the state of an engine as pairs of a name and a text."""
    if "model" in engine:
        yield "model", engine["model"]
    if "requests" in engine:
        requests = engine["requests"]
        line = f"{requests['running']} run, {requests['waiting']} wait"
        if "steps" in engine and "since_step" in engine:
            line += f"; {engine['steps']} steps, the last {engine['since_step']:.0f} s ago"
        yield "requests", line
    if "device" in engine:
        yield "device", device_line(engine)
    if engine.get("connector"):
        tier = engine.get("tier")
        room = f": {tier['used_blocks']} of {tier['total_blocks']} blocks used" if tier else ""
        yield "tier", engine["connector"] + room
    for line in disk_lines(engine):
        yield "disk", line
    if last := engine.get("last_suspension"):
        yield "suspended", last_suspension(last)
    if engine.get("host_pool"):
        yield "pool", pool_line(engine["host_pool"])
    counted = not engine.get("off")
    if counted and engine.get("connector") and "bytes" in engine and "operations" in engine:
        yield "moved", moved_line(engine)
    if counted and "hits" in engine and "queries" in engine:
        yield "hits", hits_line(engine)
    if fence := engine.get("fence"):
        line = (
            f"{fence['holding']} pages held now; {fence['released']} given back, of which "
            f"{fence['held_for_plan']} waited for a plan and {fence['held_for_transfer']} for "
            f"a transfer, at most {fence['longest_hold']} steps"
        )
        yield "fence", line


def device_line(engine: dict[str, Any]) -> str:
    """Return how much of the device is mapped, reserved and held."""
    device = engine["device"]

    def size(pages: int) -> str:
        return readable(pages * device["page_bytes"])

    fence = engine.get("fence")
    held = fence["holding"] if fence else 0
    return (
        f"{size(device['mapped_pages'])} mapped (of it {size(held)} held by the fence), "
        f"{size(device['reserved_pages'])} reserved ahead, {size(device['total_pages'])} at most; "
        f"a page is {size(1)}; with the zero page the device is charged for "
        f"{readable(charged(engine))}"
    )


def pool_line(pool: dict[str, Any]) -> str:
    """Return what an engine has of its host pool, and what all engines have."""
    line = (
        f"{readable(pool['committed'])} committed, {readable(pool['resident'])} of it blocks, "
        f"{readable(pool['ceiling'])} at most; {pool['engines']} engines have "
        f"{readable(pool['pool'])} of {readable(pool['limit'])}"
    )
    if pool["floor"]:
        line += f"; it keeps {readable(pool['floor'])}"
    if pool["coldest"] is not None:
        line += f"; the coldest was used {pool['coldest']:.0f} s ago"
    if pool["evicted"]:
        line += f"; {pool['evicted']} blocks evicted for others"
    if pool["broken"]:
        line += f"; nothing more is committed: {pool['broken']}"
    return line


def disk_line(disk: dict[str, Any]) -> str:
    """Return how full the folder of a secondary tier with a size is."""
    evicted, errors = disk["bytes"].get("evicted", 0), disk["errors"]
    line = f"{readable(disk['held_bytes'])} of {readable(disk['size_bytes'])} in block files"
    if evicted:
        line += f"; this engine removed {readable(evicted)} for newer ones"
    if errors.get("full"):
        line += f"; {errors['full']} stores not made, there was no room"
    return line


def moved_line(engine: dict[str, Any]) -> str:
    """Return what was stored and loaded, the ratio, and the stores not made."""
    stored, loaded = engine["bytes"]["stored"], engine["bytes"]["loaded"]
    operations = engine["operations"]
    ratio = f"{loaded / stored:.2f} loaded for each stored" if stored else "nothing stored yet"
    line = (
        f"{readable(stored)} stored in {operations['stored']} transfers, {readable(loaded)} "
        f"loaded in {operations['loaded']}: {ratio}"
    )
    if operations["dropped"]:
        line += f"; {operations['dropped']} stores dropped, the tier had no room"
    if operations["skipped"]:
        line += f"; {operations['skipped']} skipped by the reuse threshold"
    return line


def hits_line(engine: dict[str, Any]) -> str:
    """Return the sources of prompt tokens."""
    hits, queries = engine["hits"], engine["queries"]
    if hits is None or queries is None:
        return "not counted, as vLLM's stats are off or nothing was asked yet"
    device, looked_up = hits.get("device", 0), queries.get("device", 0)
    tier = hits.get("tier", 0)
    disk, lost = hits.get("disk", 0), engine.get("lost_tokens", 0)
    seconds, rate = engine.get("saved_seconds", 0), engine.get("prefill_rate", 0)
    saved = f"; the tier saved {seconds:.1f} s of prefill, at {rate:.0f} tokens/s"
    return (
        f"of {looked_up} prompt tokens {device} were on the device, {tier} came from the tier"
        f"{f' ({disk} of them from disk)' if disk else ''}, {looked_up - device - tier} were "
        f"computed{f', {lost} of them not for the first time' if lost else ''}"
        f"{saved if seconds and rate else ''}"
    )


def disk_lines(engine: dict[str, Any]) -> Iterator[str]:
    """Yield what each secondary tier did, and what went wrong there."""
    for disk in engine.get("disks", ()):
        is_sized = "size_bytes" in disk and "held_bytes" in disk
        said = ("full",) if is_sized else ()
        moved = disk["bytes"]
        errors = {k: n for k, n in disk["errors"].items() if n and k not in said}
        line = (
            f"{disk['tier']}: {readable(moved.get('stored', 0))} stored, "
            f"{readable(moved.get('loaded', 0))} loaded"
        )
        if errors:
            counted = ", ".join(f"{count} {kind}" for kind, count in errors.items())
            line += f"; errors: {counted}, after which blocks are computed again"
        yield line
        if is_sized:
            yield f"{disk['tier']}: {disk_line(disk)}"
