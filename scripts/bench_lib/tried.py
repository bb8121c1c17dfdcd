"""What people made of the figures: prose without figures, which docs/numbers.md shows.

TRIED: what was tried where a goal was missed, by the goal's name; shown only while it is.
READ: what a profile showed, by the profile's name.
"""

from __future__ import annotations

TRIED: dict[str, str] = {}
READ: dict[str, str] = {
    "the scheduler's part of a step": (
        "Most of it is kvcached asking the device how much memory is free; kvpatch is next to "
        "nothing of it, and was not changed for it."
    ),
}
