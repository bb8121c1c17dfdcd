"""What people made of the figures: prose without figures, which docs/numbers.md shows.

TRIED: what was tried where a goal was missed, by the goal's name; shown only while it is.
READ: what a profile showed, by the profile's name.
"""

from __future__ import annotations

TRIED: dict[str, str] = {}
READ: dict[str, str] = {}
