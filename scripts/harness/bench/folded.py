"""Reading py-spy's samples, in its format ``raw``: ``frame;frame;... count`` a line."""

from __future__ import annotations

from collections import Counter
from typing import Any

OURS = "kvpatch/"


def stacks(text: str, inside: str) -> list[tuple[list[str], int]]:
    """Return the stacks below the function ``inside``, and how often each was seen.

    Args:
        text: what py-spy wrote.
        inside: a part of the frame that the stacks are to go through.
    """
    found = []
    for line in text.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = stack.split(";")
        at = next((at for at, frame in enumerate(frames) if inside in frame), None)
        if at is not None:
            found.append((frames[at:], int(count)))
    return found


def shortened(frame: str) -> str:
    """Return a frame as a reader wants it: function and file, without a folder of ours.

    py-spy writes ``function (path/file.py:line)``.
    """
    name, _, place = frame.partition(" (")
    path = place.rstrip(")").rpartition(":")[0] or place.rstrip(")")
    for root in ("site-packages/", OURS):
        if root in path:
            kept = path[path.rindex(root) :]
            return f"{name} ({kept.removeprefix('site-packages/')})"
    return f"{name} ({path.rpartition('/')[2]})" if path else name


def _ours(frame: str) -> bool:
    return "(kvpatch/" in shortened(frame)


def profile(name: str, what: str, found: list[tuple[list[str], int]], top: int = 12) -> Any:
    """Return what stacks show, as a result file holds it.

    Raises:
        ValueError: there is not one sample.
    """
    samples = sum(count for _, count in found)
    if not samples:
        raise ValueError(f"no sample of {name}")
    itself: Counter[str] = Counter()
    ours = ours_itself = 0
    for frames, count in found:
        itself[shortened(frames[-1])] += count
        ours += count if any(_ours(frame) for frame in frames) else 0
        ours_itself += count if _ours(frames[-1]) else 0
    return {
        "name": name,
        "what": what,
        "samples": samples,
        "kvpatch_share": round(ours / samples, 4),
        "kvpatch_self_share": round(ours_itself / samples, 4),
        "top": [[frame, round(count / samples, 4)] for frame, count in itself.most_common(top)],
    }
