"""Text of files and processes of others, made safe for a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""Return ``text`` with every character that is no visible one as ``\x1b`` or ``\u202e``.

    These are the control characters C0 and C1, which move the cursor or set a terminal's
    title, line ends, characters that change the direction of text, and lone surrogates, which
    cannot be printed at all.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text
    )
