"""The prompts: conversations of random words, the same in every run.

A later turn of a conversation begins with the earlier ones, so that its blocks are found again.
No prompt depends on an answer: two servers get the same prompts even if they answer differently.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

_VOCABULARY = """
    the a of and to in page block cache layer memory token prompt engine worker copy
    store load map unmap elastic device tier region stride request answer question
    conversation returns leaves grows shrinks waits holds gives takes back again early
    late small large first last every other never always between before after while
"""


def text(name: str, size: int) -> str:
    """Return ``size`` characters of words that follow from a name."""
    source, vocabulary = random.Random(name), _VOCABULARY.split()
    words: list[str] = []
    length = 0
    while length < size:
        words.append(source.choice(vocabulary))
        length += len(words[-1]) + 1
    return " ".join(words)[:size]


@dataclass(frozen=True)
class Load:
    """The size of the prompts."""

    letters: float  # of a token, as the server's tokenizer has them
    opening: int  # tokens of a conversation's first turn
    question: int  # tokens that each later turn adds

    def prompt(self, conversation: int, turn: int) -> str:
        """Return a turn of a conversation; turns count from 1."""
        said = [text(f"conversation {conversation}", round(self.opening * self.letters))]
        for later in range(2, turn + 1):
            name = f"conversation {conversation}, turn {later}"
            said.append(text(name, round(self.question * self.letters)))
        return "\n".join(said)

    def of(self, name: str, tokens: int) -> str:
        """Return a prompt by itself, of about ``tokens`` tokens."""
        return text(name, round(tokens * self.letters))
