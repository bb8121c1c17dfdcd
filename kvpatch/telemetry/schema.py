"""The types of a page's content: what a reader of pages may rely on.

A page may be of another build of kvpatch, or of somebody who wants to confuse root's
``kvpatch status --all``. Readers tolerate fields that are missing and fields that they do not
know; a field that is there has the type that is written here.
"""

from __future__ import annotations

import math
from typing import Any

_LARGEST = 2.0**63  # of every number; more cannot be shown as a size or an age


def _is(*types: type) -> Any:
    return lambda value: isinstance(value, types)


def _or_none(shape: Any) -> Any:
    return lambda value: value is None or _fits(value, shape)


def _map_of(shape: Any) -> Any:
    return lambda value: (
        isinstance(value, dict) and all(_fits(one, shape) for one in value.values())
    )


def _list_of(shape: Any) -> Any:
    return lambda value: isinstance(value, list) and all(_fits(one, shape) for one in value)


class Group(dict[str, Any]):
    """Fields that are written together, of which none may be missing."""


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < _LARGEST and math.isfinite(value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and _number(value)


def _time(value: Any) -> bool:
    return _number(value) and 0 <= value < 1 << 36  # seconds since the epoch, to the year 4147


_text = _is(str)


def _disk(value: Any) -> bool:
    moved = Group(connector=_text, tier=_text, errors=_map_of(_count), bytes=_map_of(_count))
    size = Group(held_bytes=_count, size_bytes=_count)
    return _fits(value, moved) and ("size_bytes" not in value or _fits(value, size))


_ENGINE = {
    "model": _text,
    "index": _count,
    "requests": Group(running=_count, waiting=_count),
    "steps": _count,
    "since_step": _number,
    "waits": _number,
    "pool": _text,
    "off": _text,
    "device": Group(
        page_bytes=_count, mapped_pages=_count, reserved_pages=_count, total_pages=_count
    ),
    "fence": _or_none(
        Group(
            holding=_count,
            released=_count,
            held_for_plan=_count,
            held_for_transfer=_count,
            longest_hold=_count,
        )
    ),
    "tier": _or_none(Group(used_blocks=_count, total_blocks=_count)),
    "tiers": _list_of(Group(connector=_text, tier=_text, used_bytes=_count, total_bytes=_count)),
    "disks": _list_of(_disk),
    "host_pool": _or_none(
        Group(
            committed=_count,
            resident=_count,
            ceiling=_count,
            floor=_count,
            pool=_count,
            limit=_count,
            engines=_count,
            coldest=_or_none(_number),
            evicted=_count,
            broken=_text,
        )
    ),
    "suspended": _or_none(Group(seconds=_number, spilled=_map_of(_count), restored=_count)),
    "last_suspension": _or_none(Group(blocks=_count, kept=_count)),
    "phase": _text,
    "first_limit_bytes": _count,
    "memory": _or_none(Group(device=_text, free=_count, total=_count)),
    "saved_seconds": _number,
    "prefill_rate": _number,
    "most_bytes": _count,
    "zero_page_bytes": _count,
    "elastic": _or_none(_is(bool)),
    "rates": Group(stored=_number, loaded=_number),
    "connector": _text,
    "bytes": Group(stored=_number, loaded=_number),
    "operations": Group(stored=_count, loaded=_count, dropped=_count, skipped=_count),
    "parts": _map_of(
        Group(
            bytes=Group(stored=_number, loaded=_number),
            operations=Group(stored=_count, loaded=_count, dropped=_count, skipped=_count),
        )
    ),
    "refused": _map_of(_count),
    "verified": _or_none(_map_of(_count)),
    "hits": _or_none(_map_of(_count)),
    "queries": _or_none(_map_of(_count)),
    "lost_tokens": _count,
}
_CONTENT = {
    "vllm": _text,
    "kvcached": _text,
    "roles": _list_of(_text),
    "beats": _is(bool),
    "elastic": _or_none(_is(bool)),
    "features": _map_of(_text),
    "verified": _text,
    "group": _count,
    "server": _or_none(Group(pid=_count, started=_or_none(_count))),
    "parent": Group(pid=_count, started=_or_none(_count)),
    "namespace": _or_none(_count),
    "off": _text,
    "lost": _is(bool),
    "engine": _ENGINE,
}
_REQUIRED = Group(written=_number, started=_or_none(_count))
_REFUSAL = Group(sentence=_text, pid=_count, at=_time)


def _wrong(value: Any, shape: dict[str, Any]) -> str:
    """Return the first field of ``value`` that has another shape; empty if none has."""
    for name, inner in shape.items():
        if name not in value:
            if isinstance(shape, Group):
                return f"{name} is missing"
        elif isinstance(inner, dict) and isinstance(value[name], dict):
            if wrong := _wrong(value[name], inner):
                return f"{name}.{wrong}"
        elif not _fits(value[name], inner):
            return f"{name} is of another type"
    return ""


def _fits(value: Any, shape: Any) -> bool:
    if isinstance(shape, dict):
        return isinstance(value, dict) and not _wrong(value, shape)
    return bool(shape(value))


def checked(content: Any) -> dict[str, Any]:
    """Return the content of a page; ValueError names a field that is missing or of another type."""
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    wrong = _wrong(content, _REQUIRED) or _wrong(content, _CONTENT)
    if wrong:
        raise ValueError(wrong)
    return content


def refusals(kept: Any) -> list[dict[str, Any]]:
    """Return those entries of a refusals file that are refusals."""
    return [one for one in kept if _fits(one, _REFUSAL)] if isinstance(kept, list) else []
