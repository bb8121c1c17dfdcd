"""Text of files and processes of others, made safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return ``text`` with every character that is no visible one as ``\x1b`` or ``\u202e``."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )
