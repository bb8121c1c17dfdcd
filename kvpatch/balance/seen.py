"""The engines as ``balance`` sees them: from their control sockets, and their status pages.

A socket tells the limit, what is mapped, what requests need, and the device; a page tells how much
of the prompts was found. Engines are asked side by side: one that is stuck delays nobody.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvpatch import claims, control
from kvpatch.balance.records import Engine
from kvpatch.control import client, protocol
from kvpatch.telemetry import reader

PATIENCE = 2.0  # seconds for an engine to say what it needs
NEVER = -1  # in place of when an engine was born, if it has never answered


@dataclass(frozen=True)
class Found:
    """An engine, as the policy has it and as it can be asked."""

    engine: Engine
    device: str  # the name of its devices
    free: int = 0  # bytes of them that nobody has mapped
    models: tuple[str, ...] = ()
    why_not: str = ""  # why it does not say what it needs; empty if it does
    handle: control.Engine | None = field(default=None, compare=False)
    revision: int = 0  # of its limit


def look(
    before: Mapping[str, Found],
    alone: Mapping[str, int] = MappingProxyType({}),
    controls: float | None = None,
) -> dict[str, Found]:
    """Return this user's engines that listen; silent ones as they were, told what is controlled."""
    hits = found_tokens()
    by_path = {one.handle.path: one for one in before.values() if one.handle is not None}
    seen = client.of_each(lambda path: _one(path, by_path.get(path), hits, alone, controls))
    return {one.engine.name: one for one in seen if one is not None}


def _one(
    path: Path,
    before: Found | None,
    hits: Mapping[str, int],
    alone: Mapping[str, int],
    controls: float | None,
) -> Found | None:
    """Return the engine at a socket; None if it has ended."""
    try:
        handle = control.Engine(path, next(iter(client.ask(path, {"verb": "describe"}, PATIENCE))))
        of(handle, {}, hits)
    except (ConnectionRefusedError, FileNotFoundError, StopIteration):
        return None  # killed, or just ended
    except (OSError, KeyError, TypeError, ValueError) as error:
        return silent(before or unknown(path), f"it does not answer: {error}")
    try:
        needs = handle.demand(patience=PATIENCE, controls=controls, alone=alone.get(handle.name))
        found = of(handle, needs, hits)
        # On its way into a suspension or back its limit is its own affair.
        settled = handle.phase in ("runs", "suspended")
        return found if settled else silent(found, f"it is {handle.phase}")
    except control.Refused as refused:
        return silent(of(handle, {}, hits, before), str(refused))
    except (KeyError, TypeError, ValueError) as error:
        return silent(of(handle, {}, hits, before), f"it says what cannot be read: {error!r}")


def unknown(path: Path) -> Found:
    """Return an engine that has never answered, by its pool in /dev/shm, which names its socket."""
    name, limit = path.name, 0
    for pool in claims.BASE.iterdir():
        if protocol.path_of(pool.name) == path:
            name = pool.name
            with suppress(OSError):
                limit = _limit_of(pool)
    engine = Engine(name, limit, 0, limit, born=NEVER)
    return Found(engine, "", handle=control.Engine(path, {"name": name}))


def _limit_of(pool: Path) -> int:
    file = os.open(pool, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return int.from_bytes(os.read(file, 8), sys.byteorder)
    finally:
        os.close(file)


def of(
    handle: control.Engine,
    demand: Mapping[str, Any],
    hits: Mapping[str, int],
    before: Found | None = None,
) -> Found:
    """Return an engine from what it says, and what its prompts found, in tokens by engine."""
    said = handle.said
    born = int(said.get("started") or said.get("pid", 0))
    least, longest = int(demand.get("least", 0)), int(demand.get("longest", 0))
    tokens = hits.get(handle.name)
    same = before is not None and before.engine.born == born
    engine = Engine(
        name=handle.name,
        born=born,
        limit=int(said.get("promised", said["limit"])),
        mapped=int(demand.get("mapped", said["mapped"])),
        most=int(said["most"]),
        least=least,
        needs=int(demand.get("needs", 0)),
        running=int(said.get("running", 0)),
        waiting=int(said.get("waiting", 0)),
        found=tokens * least / longest if tokens is not None and longest else None,
        suspended=handle.phase == "suspended",
        page=int(demand.get("page", 0)),
        lends=bool(demand.get("lends")),
    )
    return Found(
        engine=engine,
        device=str(demand.get("device", before.device if same and before else "")),
        free=int(demand.get("free", 0)),
        models=tuple(handle.models),
        handle=handle,
        revision=int(said.get("revision", 0)),
    )


def silent(found: Found, why: str) -> Found:
    """Return an engine that cannot be told anything now, and keeps what it has."""
    engine = replace(found.engine, answers=False, needs=0, waiting=0)
    return replace(found, engine=engine, why_not=why)


def found_tokens() -> dict[str, int]:
    """Return the tokens that prompts found anywhere, by kvcached name: pids have namespaces."""
    return {
        seen.page.content["engine"].get("pool", ""): hits.get("device", 0)
        + hits.get("tier", 0)  # what came from a disk included
        for seen in _engines()
        if seen.page is not None and (hits := seen.page.content["engine"].get("hits"))
    }


def unheard(known: Iterable[str]) -> dict[str, str]:
    """Return the running engines without a known socket, by name, with a sentence on each."""
    names = set(known)
    found = {}
    for seen in _engines():
        assert seen.page is not None
        name = seen.page.content["engine"].get("pool") or f"pid {seen.pid}"
        if name not in names:
            release = seen.page.content.get("vllm", "vLLM")
            found[name] = f"{name} does not listen ({release}): its memory is left to it"
    return found


def _engines() -> list[reader.Seen]:
    return [seen for seen in reader.alive() if seen.page and seen.page.content.get("engine")]
