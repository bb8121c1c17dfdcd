"""What an operator sets: terms of engines, from flags and from a file."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvpatch import environ
from kvpatch.balance.records import Terms
from kvpatch.control import protocol
from kvpatch.sizes import readable

ALL = "*"  # the terms of engines without one of their own


class Wrong(ValueError):
    """A setting cannot be used; the message is one sentence."""


@dataclass(frozen=True)
class Options:
    """What a balance keeps to."""

    terms: Mapping[str, Terms] = field(default_factory=dict)  # by name, or ``*``
    every: float = 1.0  # seconds between two looks
    memory: int | None = None  # of a device, in bytes; None for what is free and theirs

    def terms_of(self, name: str, models: Iterable[str] = ()) -> Terms:
        """Return the terms of an engine."""
        set_as = [given for given in self.terms if protocol.kept(given) == name]
        for known in (name, *set_as, *models, ALL):
            if known in self.terms:
                return self.terms[known]
        return Terms()

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the names of terms that are of no engine."""
        known = {*names, ALL}
        return sorted(one for one in self.terms if not known & {one, protocol.kept(one)})


def read(path: Path) -> Options:
    """Return the options of a file; Wrong if it cannot be read, or a setting cannot be used."""
    if sys.version_info < (3, 11):
        raise Wrong(f"{path} cannot be read: a file needs Python 3.11; use options instead")
    import tomllib

    try:
        said = tomllib.loads(path.read_text())
    except OSError as error:
        raise Wrong(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # also of what is not UTF-8
        raise Wrong(f"{path} is not TOML: {error}") from error
    try:
        return of(said)
    except Wrong as wrong:
        raise Wrong(f"{path}: {wrong}") from wrong


def of(said: Mapping[str, Any]) -> Options:
    """Return the options that a file's content says; Wrong if a setting cannot be used."""
    _known(said, ("every", "memory", "engines"), "")
    options = Options()
    if "every" in said:
        options = replace(options, every=_parsed(environ.duration, said["every"], "every"))
    if "memory" in said:
        options = replace(options, memory=_parsed(environ.memory, said["memory"], "memory"))
    engines = said.get("engines", {})
    if not isinstance(engines, dict) or not all(isinstance(one, dict) for one in engines.values()):
        raise Wrong("engines is no table of tables; write [engines.NAME]")
    terms = {}
    for name, given in engines.items():
        _known(given, ("floor", "ceiling", "priority", "lends"), f"{name}: ")
        terms[name] = with_(Terms(), name, given)
    return replace(options, terms=terms)


def with_(terms: Terms, name: str, given: Mapping[str, Any]) -> Terms:
    """Return terms with the parts set that an operator gives; Wrong if one cannot be used."""
    for part in ("floor", "ceiling"):
        if part in given:
            size = _parsed(environ.memory, given[part], f"the {part} of {name}")
            terms = replace(terms, **{part: size})
    if "priority" in given:
        terms = replace(terms, priority=_priority(given["priority"], name))
    if "lends" in given:
        if not isinstance(given["lends"], bool):
            raise Wrong(f"lends of {name} is {given['lends']}, and neither true nor false")
        terms = replace(terms, lends=given["lends"])
    if terms.ceiling is not None and terms.floor > terms.ceiling:
        raise Wrong(
            f"the floor of {name}, {readable(terms.floor)}, is above its ceiling, "
            f"{readable(terms.ceiling)}"
        )
    return terms


def _priority(text: Any, name: str) -> float:
    try:
        number = float(text)
    except (TypeError, ValueError):
        number = 0.0
    if isinstance(text, bool) or not (math.isfinite(number) and 0.001 <= number <= 1000):
        raise Wrong(f"the priority of {name} is {text}, and no number from 0.001 to 1000")
    return number


def _parsed(parse: Any, value: Any, what: str) -> Any:
    try:
        return parse(str(value))
    except ValueError as error:
        raise Wrong(f"{what} is {value}, and {error}") from None


def _known(said: Mapping[str, Any], names: Iterable[str], where: str) -> None:
    for name in said:
        if name not in names:
            raise Wrong(f"{where}{name} is not known; there are {', '.join(names)}")
