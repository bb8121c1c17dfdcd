"""How the rows of a feature are written: each says what differs from the one above it.

A seam is read from the newest release to the oldest. A row holds from its ``since`` up to the
part that is newer, so that it has no end of its own; what it does not say is as in the row above
it in the seam, or else the feature's. ``patch`` has the table that results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

from kvpatch.patch import Feature, Gap, Kind, Patch, Seam


class Row(NamedTuple):
    """One change to one object of vLLM or kvcached, as far as it differs from the row above it.

    Attributes:
        id: ``feature.target``, unique.
        target: ``module:attribute.path``; ``module:`` for the same path in another module.
        wrapper: ``module:function`` in the feature's package (or whole, from ``kvpatch`` on), and
            the names that the target's signature must have, as in ``legacy:around_load(self)``.
            Without names they are those of the row above, or ``self`` of what is in a class.
        why: the fault without the patch.
        upstream: the upstream discussion or source of the fault.
        until: the event that makes the patch unnecessary; the release of the newer part, if the
            row has a fault of its own and says nothing else.
        since: the first release of vLLM that it applies to, the feature's if not given.
        but: what is different in the fault of the first row of the seam.
        kind: wrap a callable or replace an object.
        only_with: as of a ``Patch``.
        earlier: why nothing is patched before ``since``.
        later: the release from which nothing is patched any more, and why.
    """

    id: str
    target: str = ""
    wrapper: str = ""
    why: str = ""
    upstream: str = ""
    until: str = ""
    since: str = ""
    but: str = ""
    kind: Kind | None = None
    only_with: str | None = None
    earlier: str = ""
    later: tuple[str, str] | None = None


replacement = partial(Row, kind=Kind.REPLACE)
Parts = tuple[Row | Gap, ...]


def gap(why: str, since: str = "") -> Gap:
    """Return the reason why a seam has no patch, from a release on up to its newer part."""
    return Gap(since, None, why)


def seam(*parts: Row | Gap) -> Parts:
    """Return the parts of a seam, of which exactly one applies to each release."""
    return parts


_HYPHENS = str.maketrans("._", "--")


def feature(
    home: str,
    *,
    since: str,
    seams: Iterable[Row | Parts],
    name: str = "",
    upstream: str = "",
    until: str = "",
    only_with: str = "",
    **fields: Any,
) -> Feature:
    """Return a feature, with its rows as they are in each release.

    Args:
        home: its package or module; what it names of that is relative to it.
        since: the first release of vLLM that it applies to.
        seams: rows and seams, in the order of application.
        name: in the status line; its home's below ``patches``, if none is given.
        upstream, until, only_with: of rows that say nothing else.
        fields: the other fields of a ``Feature``.
    """
    blank = Patch("", "", "", upstream, until, "", (), since, only_with=only_with)
    for field in ("wanted", "requires", "prepare", "rules"):
        if field in fields:
            fields[field] = _in(home, fields[field])
    resolved: list[Seam | Patch] = []
    for one in seams:
        first, *others = _resolved(home, _with_gaps(one), blank)
        alone = isinstance(one, Row) and not others
        resolved.append(first if alone and isinstance(first, Patch) else Seam((first, *others)))
    name = name or home.removeprefix("kvpatch.patches.").translate(_HYPHENS)
    return Feature(name, since=since, seams=tuple(resolved), **fields)


def _in(home: str, name: str) -> str:
    if name.startswith("kvpatch."):
        return name
    return f"{home}{name}" if name[0] == ":" else f"{home}.{name}"


def _with_gaps(one: Row | Parts) -> Parts:
    if not isinstance(one, Row):
        return one
    later = (gap(one.later[1], one.later[0]),) if one.later else ()
    return (*later, one, *((gap(one.earlier),) if one.earlier else ()))


def _resolved(home: str, parts: Parts, blank: Patch) -> Iterator[Patch | Gap]:
    """Yield the parts of a seam with all of their fields."""
    starts = sorted({part.since or blank.since for part in parts}, key=_numbers)
    ends = dict(zip(starts, (*starts[1:], None), strict=True))
    first = above = blank
    for part in parts:
        since = part.since or blank.since
        if isinstance(part, Gap):
            yield Gap(since, ends[since], part.why)
        else:
            above = _patch(home, part, above, first, since, ends[since])
            first = first if first.id else above
            yield above


def _patch(
    home: str, row: Row, above: Patch, first: Patch, since: str, before: str | None
) -> Patch:
    """Return what a row says, and where it says nothing, what the patch above it has."""
    why = f"as {first.id}; {row.but}" if row.but else row.why
    target = row.target or above.target
    if target.endswith(":"):
        target += above.target.partition(":")[2]
    wrapper, _, names = row.wrapper.partition("(")
    if names:
        parameters = tuple(names[:-1].replace(",", "").split())
    elif above.id:
        parameters = above.parameters
    else:
        parameters = ("self",) if "." in target.partition(":")[2] else ()
    return Patch(
        row.id,
        target,
        why or above.why,
        row.upstream or above.upstream,
        row.until or (f"vLLM {before}" if before and why else above.until),
        _in(home, wrapper) if wrapper else above.wrapper,
        parameters,
        since,
        before,
        row.kind or above.kind,
        above.only_with if row.only_with is None else row.only_with,
    )


def _numbers(since: str) -> list[int]:
    return [int(number) for number in since.split(".")]
