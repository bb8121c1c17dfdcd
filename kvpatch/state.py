"""State that kvpatch keeps on objects of vLLM: one attribute, with one typed object per purpose.

A feature defines a class for its state and attaches an instance to the object of vLLM whose
lifetime it shares; reads are typed.
"""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")

ATTRIBUTE = "kvpatch"


def attach(host: Any, ours: T) -> T:
    """Keep ``ours`` on ``host``, replacing an earlier object of its class; return it."""
    every = getattr(host, ATTRIBUTE, None)
    if every is None:
        every = {}
        setattr(host, ATTRIBUTE, every)
    every[type(ours)] = ours
    return ours


def find(host: Any, kind: type[T]) -> T | None:
    """Return the object of class ``kind`` on ``host``; None if there is none, or no host."""
    every = getattr(host, ATTRIBUTE, None)
    found: T | None = None if every is None else every.get(kind)
    return found


def of(host: Any, kind: type[T]) -> T:
    """Return the object of class ``kind`` on ``host``, created without arguments if missing."""
    found = find(host, kind)
    return attach(host, kind()) if found is None else found


def drop(host: Any, kind: type[T]) -> None:
    """Let the object of class ``kind`` on ``host`` go; there is one."""
    del getattr(host, ATTRIBUTE)[kind]
