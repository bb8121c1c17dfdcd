"""The end of a run: what the operator reads, and what the verdict file has."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from kvpatch import masking
from kvpatch.sizes import readable
from kvpatch.verify.drive import Seen
from kvpatch.verify.readings import total
from kvpatch.verify.run import Result

_MOVED = "vllm:kv_offload_{}_{}_total"


def measured(seen: Seen) -> dict[str, float]:
    """Return what was measured, with every block checked, so that rates are lower bounds."""
    found: dict[str, float] = {
        "bytes stored": seen.stored,
        "bytes loaded": seen.loaded,
        "blocks loaded": seen.blocks_loaded,
        "pages at the peak": seen.pages.get("peak", 0),
        "pages given back": seen.pages.get("before", 0) - seen.pages.get("after", 0),
        "bytes of a page": seen.page_bytes,
    }
    for name, seconds in (("computed", seen.computed), ("restored", seen.restored)):
        if seconds:
            found[f"seconds to the first token, {name}"] = round(median(seconds), 4)
    for way in ("store", "load"):
        taken = total(seen.metrics, _MOVED.format(way, "time"))
        if taken:
            rate = total(seen.metrics, _MOVED.format(way, "bytes")) / taken / 1e9
            found[f"GB/s, {way}"] = round(rate, 3)
    return found


def text(result: Result) -> str:
    """Return the result for the operator."""
    judgement = result.judgement
    lines = [f"  ok       {line}" for line in judgement.right]
    lines += [f"  missing  {line}" for line in judgement.missing]
    lines += [f"  WRONG    {line}" for line in judgement.wrong]
    for name, value in measured(result.seen).items() if result.seen.conversations else ():
        shown = readable(int(value)) if name.startswith("bytes") else f"{value:g}"
        lines.append(f"  {name}: {shown}")
    if result.lifted:
        lines.append(f"  lifted: {', '.join(result.lifted)}")
    end = _ends[judgement.word]
    if judgement.wrong and result.lifted:
        end = "this command stays refused; report it with the logs"
    lines.append(f"{judgement.word.upper()}: {end}")
    return "\n".join(lines)


_ends = {
    "right": "this command starts on this machine with KVPATCH=1",
    "wrong": "run this command with KVPATCH=0, and report it with the logs",
    "unfinished": "not everything that a verdict needs was seen",
}


def content(result: Result, command: Sequence[str], date: str, plain: bool) -> dict[str, Any]:
    """Return the content of a verdict file, which is sent and checked in."""
    judgement = result.judgement
    return {
        "verdict": judgement.word,
        "date": date,
        "command": masking.command(command),
        "lifted": result.lifted,
        "combination": masking.masked(result.combination),
        "right": judgement.right,
        "wrong": judgement.wrong,
        "compared with plain vLLM": plain,
        "measured": measured(result.seen),
    }
