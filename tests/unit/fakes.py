"""Doubles that several tests use."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def raising(error: BaseException | type[BaseException]) -> Callable[..., NoReturn]:
    """A function that takes anything and raises ``error``."""

    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise error

    return fail
