"""The table of ``kvpatch status``: a line per engine, and a sentence per process that needs one."""

from __future__ import annotations

from typing import Any

from kvpatch.cli.columns import columns
from kvpatch.sizes import readable
from kvpatch.telemetry import port, reader
from kvpatch.telemetry.printable import printable
from kvpatch.telemetry.reader import Seen, State

HEAD = (
    *("PID", "NAME", "PORT", "MODEL", "STATE", "RUN", "WAIT"),
    *("DEVICE", "MAPPED", "RESERVED", "HELD", "LIMIT", "TIER", "STORE/s", "LOAD/s"),
    *("HITS dev/tier/new", "STEP"),
)
# What is left out first where a terminal is too narrow.
LESS = ("STEP", "RESERVED", "HELD", "STORE/s", "LOAD/s", "PORT", "TIER", "HITS dev/tier/new")
SHOWN = 600.0  # seconds for which an engine that has ended is mentioned
_NONE = "-"


def table(seen: list[Seen], width: int | None = None) -> str:
    """Return the engines as a table of some width, and below it what does not run as it should."""
    engines = [one for one in seen if is_shown(one)]
    parts = []
    if engines:
        parts.append(fitting([HEAD, *(row(one) for one in engines)], width))
    parts += device_lines(engines)
    parts += disk_errors(engines)
    for engine in map(_engine, engines):
        if (last := engine.get("last_suspension")) and last["kept"] < last["blocks"]:
            parts.append(printable(f"{engine.get('pool') or _NONE}: {last_suspension(last)}"))
    # A running process without an engine is a part of one.
    lines = [
        printable(one.line)
        for one in seen
        if one.state not in (State.RUNS, State.ENDED, State.FOREIGN)
    ]
    parts += lines
    foreign = [one for one in seen if one.state is State.FOREIGN]
    if foreign:
        parts.append(
            f"{_count(len(foreign), 'process', 'processes')} of other containers that share this "
            "folder: whether they run cannot be seen from here; -v says more"
        )
    for one in seen:
        if one.state is State.ENDED and _engine(one) and one.page and one.page.age < SHOWN:
            name = printable(_engine(one).get("pool") or _NONE)
            parts.append(f"{printable(one.line)}: {name}")
    return "\n".join(parts)


def fitting(lines: list[tuple[str, ...]], width: int | None) -> str:
    """Return the table with as many of its columns as a terminal has room for."""
    text = columns(lines)
    if width is None:
        return text
    left_out: list[str] = []
    for name in LESS:
        if max(map(len, text.splitlines())) <= width:
            break
        left_out.append(name)
        kept = [n for n, head in enumerate(HEAD) if head not in left_out]
        text = columns(tuple(line[n] for n in kept) for line in lines)
    if left_out:
        names = ", ".join(name.partition(" ")[0] for name in left_out)
        text += f"\n(this terminal is too narrow for {names}; kvpatch status | cat has all)"
    return text


def device_lines(engines: list[Seen]) -> list[str]:
    """Return a line for each device: how large it is, what is free, and what limits add up to."""
    devices: dict[tuple[str, int], list[tuple[float, dict[str, Any]]]] = {}
    for one in engines:
        engine = _engine(one)
        if (memory := engine.get("memory")) and "device" in engine and one.page:
            key = (memory["device"], memory["total"])
            devices.setdefault(key, []).append((one.page.age, engine))
    lines = []
    for (name, total), found in devices.items():
        free = min(found, key=lambda one: one[0])[1]["memory"]["free"]
        each = [engine for _, engine in found]
        limits = sum(one["device"]["total_pages"] * one["device"]["page_bytes"] for one in each)
        taken = sum(map(charged, each))
        lines.append(
            printable(
                f"{name}: {readable(total)}, {readable(free)} free; its "
                f"{_count(len(each), 'engine has', 'engines have')} {readable(taken)}, and limits "
                f"of {readable(limits)} together"
            )
        )
    return lines


def disk_errors(engines: list[Seen]) -> list[str]:
    """Return a line for each secondary tier whose disk has failed."""
    lines = []
    for one in engines:
        for disk in _engine(one).get("disks", ()):
            counted = [f"{count} {kind}" for kind, count in disk["errors"].items() if count]
            if counted:
                name = _engine(one).get("pool") or str(one.pid)
                lines.append(
                    printable(
                        f"{name}: errors of the secondary tier {disk['tier']}: "
                        f"{', '.join(counted)}; its blocks are computed again (the log says why)"
                    )
                )
    return lines


def last_suspension(last: dict[str, int]) -> str:
    """Return what an engine's last suspension kept and lost."""
    lost = last["blocks"] - last["kept"]
    return f"its last suspension kept {last['kept']} of {last['blocks']} blocks" + (
        f", and lost {lost}, which are computed again when asked for" if lost else ""
    )


def is_shown(seen: Seen) -> bool:
    """Return whether a process is an engine that runs, or may run in another container."""
    if not _engine(seen) or seen.page is None or seen.state in reader.OVER:
        return False
    return seen.state is not State.FOREIGN or seen.page.age < reader.SILENT


def row(seen: Seen) -> tuple[str, ...]:
    """Return the cells of one engine; ``-`` for what its page does not tell."""
    assert seen.page is not None
    engine = _engine(seen)
    requests = engine.get("requests") or {}
    cells = (
        str(seen.pid),
        engine.get("pool") or _NONE,
        _port(seen),
        _model(engine.get("model", "")),
        _state(seen),
        str(requests.get("running", _NONE)),
        str(requests.get("waiting", _NONE)),
        *_memory(engine),
        _tier(engine),
        *_rates(engine),
        _hits(engine),
        f"{engine['since_step'] + seen.page.age:.0f} s ago" if "since_step" in engine else _NONE,
    )
    return tuple(printable(cell) for cell in cells)


def charged(engine: dict[str, Any]) -> int:
    """Return the bytes of the device that an engine's KV cache takes, of every kind."""
    device = engine["device"]
    pages = device["mapped_pages"] + device["reserved_pages"]
    return int(pages * device["page_bytes"] + engine.get("zero_page_bytes", 0))


def _engine(seen: Seen) -> dict[str, Any]:
    return (seen.page.content.get("engine") or {}) if seen.page is not None else {}


def _state(seen: Seen) -> str:
    content = seen.page.content if seen.page else {}
    words = [seen.state.value]
    if content.get("elastic") is False:
        words.append("not elastic")
    if content.get("off") or _engine(seen).get("off"):
        words.append("not counted")
    return ", ".join(words)


def _port(seen: Seen) -> str:
    if seen.page is None or seen.state is State.FOREIGN:
        return _NONE
    server = reader.server_of(seen.page)
    return str((server and port.of(server)) or _NONE)


def _model(name: str) -> str:
    # What is served under its path is told by the end of it.
    return name.rstrip("/").rpartition("/")[2][-32:] or _NONE


def _memory(engine: dict[str, Any]) -> tuple[str, ...]:
    if "device" not in engine:
        return (_NONE,) * 5
    device, fence = engine["device"], engine.get("fence")
    pages = (
        device["mapped_pages"],
        device["reserved_pages"],
        fence["holding"] if fence else 0,
        device["total_pages"],
    )
    return (
        readable(charged(engine)),
        *(readable(count * device["page_bytes"]) for count in pages),
    )


def _tier(engine: dict[str, Any]) -> str:
    tier = engine.get("tier")
    if not tier:
        return _NONE
    return f"{tier['used_blocks']}/{tier['total_blocks']}"


def _rates(engine: dict[str, Any]) -> tuple[str, str]:
    rates = engine.get("rates")
    if not rates or not engine.get("connector") or engine.get("off"):
        return _NONE, _NONE
    return readable(round(rates["stored"])), readable(round(rates["loaded"]))


def _hits(engine: dict[str, Any]) -> str:
    hits, queries = engine.get("hits"), engine.get("queries")
    asked = (queries or {}).get("device", 0)
    if hits is None or not asked or engine.get("off"):
        return _NONE
    device, tier = (100 * hits.get(source, 0) / asked for source in ("device", "tier"))
    return f"{device:.0f}/{tier:.0f}/{max(0.0, 100 - device - tier):.0f} %"


def _count(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"
