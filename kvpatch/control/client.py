"""Asking the engines of this user."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from kvpatch import private
from kvpatch.control import protocol
from kvpatch.sizes import readable

TOGETHER = 64  # engines that are asked at a time
ANSWERS = 5.0  # seconds in which an engine's thread of its own answers, however busy the engine is
SILENT = 60.0  # seconds without a line, of which that thread sends several each second
Tell = Callable[[dict[str, Any]], None]
T = TypeVar("T")


class Refused(RuntimeError):
    """An engine, or this command, did not do what was asked; the message is one sentence."""


class Unanswered(Refused):
    """What was asked may still be done: the engine ended, or has not answered in time."""


@dataclass(frozen=True)
class Answer:
    """How a question ended.

    Attributes:
        phase: of the engine, one of ``runs`` and ``suspended`` once a verb has ended.
        resident: blocks with a hash that were on the device.
        kept: those of them that are in the tier.
        partial: those of them that fill no chunk (``blocks_per_chunk``), which no tier stores.
        lost: the others that are nowhere, which like these are computed again when asked for.
        freed: bytes of the device that were given back.
        mapped: bytes of the device that are mapped or reserved now.
        limit: bytes that the engine may map now.
        seconds: from the question to the answer, in the engine.
        planned: whether these are the blocks of a plan, and nothing was done.
        later: bytes that it may map from its resumption on; 0 if that was not asked for.
        said: the whole line, with fields of later versions.
    """

    phase: str
    resident: int = 0
    kept: int = 0
    partial: int = 0
    lost: int = 0
    freed: int = 0
    mapped: int = 0
    limit: int = 0
    seconds: float = 0.0
    planned: bool = False
    later: int = 0
    said: dict[str, Any] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, said: dict[str, Any]) -> Answer:
        """Return the answer that a line says."""
        names = ("resident", "kept", "partial", "lost", "freed", "mapped", "limit", "seconds")
        numbers = {name: said[name] for name in names if name in said}
        planned = bool(said.get("plan"))
        return cls(phase=str(said.get("phase", "")), planned=planned, said=said, **numbers)

    @property
    def sentence(self) -> str:
        """The outcome for a person."""
        if self.planned and self.phase != "suspended":
            return self._plan
        if self.later and self.phase != "runs":
            own = replace(self, later=0).sentence
            return f"{own}; the limit is taken: {readable(self.later)} from its resumption on"
        if self.phase != "suspended":
            does = "it runs" if self.phase == "runs" else f"it is {self.phase}"
            said = f"{does}, with {readable(self.mapped)} mapped of {readable(self.limit)} at most"
            if self.phase == "runs" and self.mapped > self.limit:
                said += "; what its requests use is given back as they end"
            return said
        kept = f"{self.kept} of {self.resident} blocks are in the tier"
        if self.lost:
            kept += f", {self.lost} did not fit and will be computed again"
        if self.partial:
            kept += f", {self.partial} fill no chunk and will be computed again"
        return (
            f"it is suspended: {kept}; {readable(self.freed)} given back, {readable(self.mapped)} "
            "still mapped"
        )

    @property
    def _plan(self) -> str:
        said = f"{self.kept} of {self.resident} blocks would be kept"
        if self.lost:
            said += f", {self.lost} do not fit into the tier and would be computed again"
        if self.partial:
            said += f", {self.partial} fill no chunk and would be computed again"
        running = self.said.get("running", 0)
        return said + (f"; running requests that would be preempted: {running}" if running else "")


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
    def most(self) -> int:
        """The bytes of the device that its KV cache could have, all mapped."""
        return int(self.said.get("most", 0))

    @property
    def first(self) -> int:
        """The bytes that it could map when it started."""
        return int(self.said.get("first", self.most))

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

    def limit(
        self,
        size: int,
        *,
        revision: int | None = None,
        patience: float | None = None,
        tell: Tell | None = None,
    ) -> Answer:
        """Set the bytes of the device that it may map.

        Args:
            size: those bytes.
            revision: one more than the ``revision`` of ``said``, so that the limit is refused if
                somebody else has set one since; None to set it in any case.
            patience: seconds after which the answer is not waited for any longer; the engine goes
                on with what it was asked.
            tell: called with every line of progress.

        Raises:
            Refused: it is no size that the engine can have, or it has not answered yet.
        """
        asked: dict[str, Any] = {"verb": "limit", "size": size}
        if revision is not None:
            asked["revision"] = revision
        answer = self._ask(asked, tell, patience)
        return answer if answer.phase == "runs" else replace(answer, later=size)

    def demand(
        self,
        *,
        patience: float = ANSWERS,
        controls: float | None = None,
        alone: int | None = None,
    ) -> dict[str, Any]:
        """Return what it needs and could have, see ``suspend.demand``.

        Args:
            patience: seconds to wait for the answer.
            controls: seconds for which the caller sees to the limits of all engines of the device:
                so long its prefix cache is bounded by its limit alone, unless its operator set
                ``KVCACHED_MAX_CACHED_TOKENS``.
            alone: bytes of the limit that it is to take when it has not been asked again by then;
                None for the one that it has.

        Raises:
            Refused: it does not know, or does not answer in time.
        """
        asked: dict[str, Any] = {"verb": "demand"}
        if controls is not None:
            asked["controls"] = controls
        if alone is not None:
            asked["alone"] = alone
        return self._ask(asked, None, patience).said

    def _ask(
        self, question: dict[str, Any], tell: Tell | None, patience: float | None = None
    ) -> Answer:
        said: dict[str, Any] = {}
        until = None if patience is None else time.monotonic() + patience
        silent = SILENT if patience is None else min(SILENT, patience)
        try:
            for said in ask(self.path, question, silent):
                if until is not None and not said.get("done") and time.monotonic() > until:
                    raise Unanswered(f"{self.name} has not answered within {patience:g} s")
                if tell is not None and not said.get("done"):
                    tell(said)
        except (OSError, ValueError) as error:
            raise Unanswered(f"{self.name} did not answer: {error}") from error
        if "error" in said:
            raise Refused(str(said["error"]))
        if not said.get("done"):
            raise Unanswered(f"{self.name} ended before it had answered")
        return Answer.of(said)


@dataclass(frozen=True)
class Silent:
    """An engine that listens and does not answer: it is stopped, or waits for the machine.

    Attributes:
        path: of its socket.
        pid: of its process; 0 if it cannot be seen.
    """

    path: Path
    pid: int

    @property
    def sentence(self) -> str:
        """What is known of it, for a person."""
        return f"{f'process {self.pid}' if self.pid else self.path} listens and does not answer"


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
    """Return the engines of this user that listen and answer, by name.

    Raises:
        private.Unsafe: the folder of their sockets is another user's, or open to others.
    """
    return every()[0]


def every() -> tuple[list[Engine], list[Silent]]:
    """Return the engines of this user that answer, by name, and those that do not.

    Raises:
        private.Unsafe: the folder of their sockets is another user's, or open to others.
    """
    asked = list(of_each(_at))
    found = [one for one in asked if isinstance(one, Engine)]
    silent = [one for one in asked if isinstance(one, Silent)]
    return sorted(found, key=lambda engine: engine.name), silent


def of_each(ask: Callable[[Path], T]) -> list[T]:
    """Return what is asked at the sockets of this user's engines, of several at a time.

    Raises:
        private.Unsafe: their folder is another user's, or open to others.
    """
    home = protocol.folder()
    try:
        private.check_folder(home)
        paths = sorted(home.glob("*.sock"))
    except FileNotFoundError:
        return []
    from concurrent.futures import ThreadPoolExecutor  # here, because a verb asks one engine

    with ThreadPoolExecutor(min(TOGETHER, max(1, len(paths)))) as pool:
        return list(pool.map(ask, paths))


def _at(path: Path) -> Engine | Silent | None:
    """Return the engine at a socket; None if it has ended, or is none."""
    try:
        for said in ask(path, {"verb": "describe"}, ANSWERS):
            return Engine(path, said)
    except (TimeoutError, BlockingIOError):  # or as many as can wait for it do
        return Silent(path, _listener(path))
    except (OSError, ValueError):
        pass
    return None


def _listener(path: Path) -> int:
    with suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        connection.connect(str(path))
        return protocol.pid_of(connection)
    return 0


def find(name: str) -> Engine:
    """Return the engine with a kvcached name, the name of a model, or a pid.

    A kvcached name may be as it was set, or as kvcached keeps it. One that its data parallel
    server was given is that of the only rank here, if there is one.

    Raises:
        Refused: there is none, it does not answer, or several serve the model.
    """
    kept = protocol.kept(name)
    own = _at(protocol.path_of(kept))  # the others may be stopped, and are not waited for
    if isinstance(own, Engine) and own.name == kept:
        return own
    if isinstance(own, Silent):
        raise Refused(f"{own.sentence} within {ANSWERS:g} s")
    known, silent = every()
    exact = [engine for engine in known if engine.name == kept]
    others = [
        engine
        for engine in known
        if name in engine.models
        or name == str(engine.said.get("pid"))
        or protocol.is_rank_of(engine.name, kept)
    ]
    found = exact or others
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(engine.name for engine in found)
        raise Refused(f"{len(found)} engines serve {name}: use one of the names {names}")
    raise Refused(_unknown(name, known, silent))


def _unknown(name: str, known: list[Engine], silent: list[Silent]) -> str:
    for one in silent:
        if name == str(one.pid):
            return f"{one.sentence} within {ANSWERS:g} s"
    from kvpatch.telemetry import reader  # here, because an engine that listens needs no page

    named = []
    for seen in reader.all_of(False):
        content = {} if seen.page is None else seen.page.content
        if name in ((content.get("engine") or {}).get("pool"), str(seen.pid)):
            named.append((seen, content))
    for seen, content in sorted(
        named, key=lambda one: one[0].state in reader.OVER
    ):  # an earlier one last
        if seen.state in reader.OVER:
            return f"{name} is gone, with what it had in its caches: {seen.line}"
        if seen.state is reader.State.FOREIGN:
            return f"{name} does not listen here: {seen.line}"
        return (
            f"{name} does not listen: it runs {content.get('vllm', 'vLLM')} in process "
            f"{seen.pid}, where engines cannot be suspended (see kvpatch list, docs/support.md)"
        )
    said = [f"no engine {name} of {private.user(os.geteuid())} listens"]
    if known:
        said.append(f"there are {', '.join(engine.name for engine in known)}")
    return "; ".join(said + [one.sentence for one in silent])
