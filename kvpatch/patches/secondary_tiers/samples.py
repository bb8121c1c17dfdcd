"""A digest of values of many tensors, read with few transfers from a device.

Tensors of up to ``WHOLE`` values count whole. Of larger ones, values on several diagonals of the
memory count: a value of every row, or of every n-th row of a very large tensor, in all columns in
turn. So every matrix of a stack, such as the experts of a layer, counts.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

WHOLE = 1 << 14
ROWS = 1 << 14  # rows that one diagonal comes to; more, if a stack has more matrices
TURNS = (1, -1, 1, -1)  # of the diagonals, each of which begins at other rows
LEAST = 1 << 10  # values of one diagonal, of a tensor with few rows
_BATCH = 64 << 20  # bytes that are transferred at once


class Samples:
    """Collects tensors; each with its name, dtype and shape."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._batches: dict[Any, list[Any]] = {}
        self._sizes: dict[Any, int] = {}

    def add(self, name: str, tensor: Any) -> None:
        """Add a tensor on any device; ``digest`` depends on the order."""
        self._digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        if tensor.is_meta or not tensor.numel():
            return
        for values in diagonals(tensor.detach()):
            key = (str(values.device), values.element_size())
            self._batches.setdefault(key, []).append(values)
            self._sizes[key] = self._sizes.get(key, 0) + values.numel() * values.element_size()
            if self._sizes[key] >= _BATCH:
                self._transfer(key)

    def digest(self) -> str:
        """Return the digest of all that was added."""
        for key in sorted(self._batches):
            self._transfer(key)
        return self._digest.hexdigest()

    def _transfer(self, key: Any) -> None:
        import torch

        batch = self._batches.pop(key)
        del self._sizes[key]
        values = torch.cat([integers(values) for values in batch]).cpu()
        self._digest.update(values.contiguous().view(torch.uint8).numpy().tobytes())


def integers(tensor: Any) -> Any:
    """Return the bits of a tensor as integers of its size, so that all dtypes can be joined."""
    import torch

    if tensor.is_complex():
        return integers(torch.view_as_real(tensor)).reshape(-1)
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(sizes[tensor.element_size()])


def diagonals(tensor: Any) -> list[Any]:
    """Return one-dimensional tensors with the values of ``tensor`` that count."""
    # In the order of the memory: a transposed matrix is as good as a matrix.
    order = sorted(range(tensor.dim()), key=lambda dimension: -tensor.stride(dimension))
    ordered = tensor.permute(order)
    count = tensor.numel()
    if count <= WHOLE:
        return [ordered.reshape(-1)]
    columns = ordered.shape[-1]
    rows = count // columns
    apart = -(-rows // ROWS)
    if tensor.dim() > 2:  # the first dimension counts matrices
        apart = min(apart, rows // tensor.shape[0])
    return [
        values_at(
            ordered,
            number * apart // len(TURNS) * columns + number * columns // len(TURNS),
            _coprime(max(1, min(apart * columns + turn, count // LEAST)), columns),
        )
        for number, turn in enumerate(TURNS)
    ]


def _coprime(step: int, columns: int) -> int:
    """Return a step of at most ``step`` that comes to every column in turn."""
    while math.gcd(step, columns) > 1:
        step -= 1
    return step


def values_at(tensor: Any, start: int, step: int) -> Any:
    """Return every ``step``-th value of a tensor of any strides, from ``start`` on."""
    import torch

    if tensor.is_contiguous():
        return tensor.view(-1)[start::step]
    at = torch.arange(start, tensor.numel(), step, device=tensor.device)
    places = []
    for size in reversed(tensor.shape):
        places.append(at % size)
        at = at // size
    return tensor[tuple(reversed(places))]
