"""Asking the engines of this user."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvpatch import private
from kvpatch.control import protocol
from kvpatch.sizes import readable
from kvpatch.telemetry import reader

ANSWERS = 5.0  # seconds in which an engine's thread of its own answers, however busy the engine is
SILENT = 60.0  # seconds without a line, of which that thread sends several each second
Tell = Callable[[dict[str, Any]], None]


class Refused(RuntimeError):
    """An engine, or this command, did not do what was asked; the message is one sentence."""


@dataclass(frozen=True)
class Answer:
    """How a question ended.

    Attributes:
        phase: of the engine, one of ``runs`` and ``suspended`` once a verb has ended.
        resident: blocks with a hash that were on the device.
        kept: those of them that are in the tier.
        lost: those of them that are nowhere, and are computed again when they are asked for.
        freed: bytes of the device that were given back.
        mapped: bytes of the device that are mapped or reserved now.
        limit: bytes that the engine may map now.
        seconds: from the question to the answer, in the engine.
        said: the whole line, with fields of later versions.
    """

    phase: str
    resident: int = 0
    kept: int = 0
    lost: int = 0
    freed: int = 0
    mapped: int = 0
    limit: int = 0
    seconds: float = 0.0
    said: dict[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, said: dict[str, Any]) -> Answer:
        """Return the answer that a line says."""
        names = ("resident", "kept", "lost", "freed", "mapped", "limit", "seconds")
        numbers = {name: said[name] for name in names if name in said}
        return cls(phase=str(said.get("phase", "")), said=said, **numbers)

    @property
    def sentence(self) -> str:
        """The outcome for a person."""
        if self.phase != "suspended":
            does = "it runs" if self.phase == "runs" else f"it is {self.phase}"
            said = f"{does}, with {readable(self.mapped)} mapped of {readable(self.limit)} at most"
            if self.phase == "runs" and self.mapped > self.limit:
                said += "; what its requests use is given back as they end"
            return said
        kept = f"{self.kept} of {self.resident} blocks are in the tier"
        if self.lost:
            kept += f", {self.lost} did not fit and will be computed again"
        return (
            f"it is suspended: {kept}; {readable(self.freed)} given back, {readable(self.mapped)} "
            "still mapped"
        )


@dataclass(frozen=True)
class Engine:
    """An engine that listens.

    Attributes:
        path: of its socket.
        said: its description of itself, see ``suspend.server.describe``.
    """

    path: Path
    said: dict[str, Any]

    @property
    def name(self) -> str:
        """Its kvcached name."""
        return str(self.said.get("name", ""))

    @property
    def models(self) -> list[str]:
        """The names of the model that it serves."""
        return [str(one) for one in self.said.get("models", ())]

    @property
    def phase(self) -> str:
        """What it is doing: ``runs``, ``suspended`` or on its way."""
        return str(self.said.get("phase", ""))

    def suspend(
        self,
        *,
        finish: bool = False,
        whole: bool = False,
        timeout: float | None = None,
        tell: Tell | None = None,
    ) -> Answer:
        """Store what only the device has, and give its memory back; requests wait from now on.

        Args:
            finish: let running requests finish first, instead of preempting them.
            whole: do not suspend if the tier cannot keep every block.
            timeout: seconds after which the engine runs on as before; None for no limit.
            tell: called with every line of progress.

        Raises:
            Refused: it is not suspended, or not as asked; the message says why.
        """
        asked = {"finish": finish, "whole": whole, "timeout": timeout}
        return self._ask({"verb": "suspend", **asked}, tell)

    def plan(self) -> Answer:
        """Return what a suspension would keep and lose now, without one.

        Raises:
            Refused: it cannot be suspended.
        """
        return self._ask({"verb": "suspend", "plan": True}, None)

    def resume(self, *, tell: Tell | None = None) -> Answer:
        """Give it its limit back; requests that waited run.

        Raises:
            Refused: the engine failed to.
        """
        return self._ask({"verb": "resume"}, tell)

    def limit(self, size: int, *, tell: Tell | None = None) -> Answer:
        """Set the bytes of the device that it may map.

        Raises:
            Refused: it is no size that the engine can have.
        """
        return self._ask({"verb": "limit", "size": size}, tell)

    def _ask(self, question: dict[str, Any], tell: Tell | None) -> Answer:
        said: dict[str, Any] = {}
        try:
            for said in ask(self.path, question, SILENT):
                if tell is not None and not said.get("done"):
                    tell(said)
        except (OSError, ValueError) as error:
            raise Refused(f"{self.name} did not answer: {error}") from error
        if "error" in said:
            raise Refused(str(said["error"]))
        if not said.get("done"):
            raise Refused(f"{self.name} ended before it had answered")
        return Answer.of(said)


def ask(path: Path, question: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
    """Ask the engine at a socket; iterate over what it says.

    Args:
        path: the socket.
        question: a verb and what belongs to it.
        timeout: seconds without a line after which it is given up.

    Raises:
        OSError: nobody listens there, nothing is said, or the folder is open to others.
        ValueError: it is not an engine that answers.
    """
    private.check_folder(path.parent)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout)
        connection.connect(str(path))
        protocol.check_peer(connection)
        protocol.send(connection, question)
        yield from protocol.lines(connection)


def engines() -> list[Engine]:
    """Return the engines of this user that listen, by name.

    Raises:
        private.Unsafe: the folder of their sockets is another user's, or open to others.
    """
    home = protocol.folder()
    try:
        private.check_folder(home)
        paths = sorted(home.glob("*.sock"))
    except FileNotFoundError:
        return []
    found = []
    for path in paths:
        with suppress(OSError, ValueError):  # it has ended, or does not answer
            for said in ask(path, {"verb": "describe"}, ANSWERS):
                found.append(Engine(path, said))
                break
    return sorted(found, key=lambda engine: engine.name)


def find(name: str) -> Engine:
    """Return the engine with a kvcached name, the name of a model, or a pid.

    Raises:
        Refused: there is none, or several serve the model.
    """
    every = engines()
    exact = [engine for engine in every if engine.name == name]
    others = [
        engine for engine in every if name in engine.models or name == str(engine.said.get("pid"))
    ]
    found = exact or others
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(engine.name for engine in found)
        raise Refused(f"{len(found)} engines serve {name}: use one of the names {names}")
    raise Refused(_unknown(name, every))


def _unknown(name: str, every: list[Engine]) -> str:
    for seen in reader.all_of(False):
        content = {} if seen.page is None else seen.page.content
        engine = content.get("engine") or {}
        if name in (engine.get("pool"), str(seen.pid)):
            return (
                f"{name} does not listen: it runs {content.get('vllm', 'vLLM')} in process "
                f"{seen.pid}, where engines cannot be suspended (see kvpatch list, docs/support.md)"
            )
    known = ", ".join(engine.name for engine in every)
    return f"no engine {name} of {private.user(os.geteuid())} listens" + (
        f"; there are {known}" if known else ""
    )
