"""What a wrapper was called with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, name: str) -> Any:
    """Return an argument of a wrapped call, given by its name or by its position.

    Args:
        args, kwargs: as wrapt hands them to a wrapper; without ``self`` of a method.
        position: where the argument stands in the signature, from 0.
        name: what it is called there; rows of the registry name it in ``parameters``.

    Raises:
        IndexError: it was not given.
    """
    return kwargs[name] if name in kwargs else args[position]
