"""The loop: look at the engines, plan, let those give that are to give, and raise the others.

A limit is raised by what nobody has once another has given, and by no more. So whoever stops
this loop between any two of its steps leaves limits that the device can hold, and engines that are
as right as ever: an engine does itself what it was asked for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from kvpatch import claims, control
from kvpatch.balance import policy, seen
from kvpatch.balance.event import Event
from kvpatch.balance.options import Options
from kvpatch.balance.records import Move, Past, Settings, Terms
from kvpatch.balance.seen import Found

GIVES = 20.0  # seconds in which an engine gives back; it goes on if it takes longer
GETS = 5.0  # seconds in which it takes a higher limit
STEADY = 0.02  # part of a device by which its memory may seem to grow without any consequence
Look = Callable[[Mapping[str, Found], Mapping[str, int]], dict[str, Found]]
SetLimit = Callable[[Found, int, float], int]


class Busy(RuntimeError):
    """Another balance of this user runs, or may; the message is one sentence."""


@contextmanager
def alone() -> Iterator[None]:
    """Be the only balance of this user on this machine, or raise Busy; a killed one is none."""
    try:
        claim = claims.take("balance", "")
    except claims.Taken as taken:
        who = "" if taken.pid is None else f" (pid {taken.pid})"
        raise Busy(f"another kvpatch balance of this user runs{who}") from None
    except TimeoutError:
        raise Busy(
            f"a process that is stopped or hangs has kept {claims.folder()} locked for "
            f"{claims.TO_TAKE:g} s"
        ) from None
    try:
        yield
    finally:
        claim.release()


def set_limit(found: Found, size: int, patience: float) -> int:
    """Set an engine's limit unless another was set since it was seen; return that which it has."""
    assert found.handle is not None
    answer = found.handle.limit(size, revision=found.revision + 1, patience=patience)
    return answer.later or answer.limit


class Balance:
    """Moves limits between engines, and tells everything that happens; a test replaces the rest."""

    def __init__(
        self,
        options: Options | None = None,
        tell: Callable[[Event], None] = lambda event: None,
        *,
        dry: bool = False,
        settings: Settings | None = None,
        look: Look | None = None,
        set_limit: SetLimit = set_limit,
        unheard: Callable[[Iterable[str]], Mapping[str, str]] = seen.unheard,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.options = options or Options()
        self.found: dict[str, Found] = {}  # of the last look, by name
        self._tell, self._dry = tell, dry
        self._settings = settings or Settings()
        # Some looks later an engine is alone: until then its prefix cache may fill its limit.
        controls = None if dry else 10 + 3 * self.options.every
        self._look = look or partial(seen.look, controls=controls)
        self._set_limit, self._unheard = set_limit, unheard
        self._clock, self._wall = clock, wall
        self._past: dict[str, Mapping[str, Past]] = {}
        self._alone: dict[str, int] = {}  # limits of engines without this loop
        self._told: dict[str, int] = {}  # those that they know of
        self._sizes: dict[str, int] = {}
        self._seen_at = 0.0
        self._notes: set[tuple[str, str]] = set()
        self._asked: dict[str, tuple[int, int, int]] = {}  # limits whose answer has not come
        self._would: dict[str, tuple[int, str]] = {}  # what a dry run has said

    def run(self, stop: threading.Event | None = None, rounds: int | None = None) -> None:
        """Balance until ``stop`` is set, or for some rounds."""
        stop = stop or threading.Event()
        while not stop.is_set():
            begun = self._clock()
            self.round()
            if rounds is not None and (rounds := rounds - 1) <= 0:
                break
            stop.wait(max(0.0, self.options.every - (self._clock() - begun)))
        if not self._dry and any(
            policy.lends(one.engine, self._rule(name)) for name, one in self.found.items()
        ):
            # Nobody looks from now on: what one request needs goes back to who lends it.
            self._settings = replace(self._settings, lent=0.0, rest=0.0)
            self.round()
            self._look_once()  # and they take by themselves what others have not given by now

    def round(self) -> None:
        """Look once, and do what is due."""
        notes: set[tuple[str, str]] = set()
        self._look_once()
        for sentence in self._unheard(self.found).values():
            notes.add(("", sentence))
        groups: dict[str, list[str]] = {}
        for name, one in self.found.items():
            groups.setdefault(one.device, []).append(name)
        for name in self.unknown():
            notes.add(("", f"no engine is called {name}"))
        for device, members in groups.items():
            why_not = _why_not(device, groups)
            if why_not:
                notes.update((name, why_not) for name in members)
            else:
                notes.update(("", note) for note in self._balance(device))
        for note in sorted(notes - self._notes):
            self._say(note[0], "note", note[1])
        self._notes = notes

    def unknown(self) -> list[str]:
        """Return the names that have settings, and are of no engine of the last look."""
        names = [name for one in self.found.values() for name in (one.engine.name, *one.models)]
        return self.options.unused(names)

    def _balance(self, device: str) -> tuple[str, ...]:
        """Balance the engines of one device; return what is to be noted."""
        size = self._size(device)
        if size is None:
            return ()
        if any(one.engine.born == seen.NEVER for one in self.found.values()):
            # It may be on this device, and map what is free here.
            size = min(size, sum(one.engine.held for one in self._on(device)))
        engines = [one.engine for one in self._on(device)]
        past, now = self._past.get(device, {}), self._clock()
        plan = policy.plan(engines, size, past, now, self._rule, self._settings)
        self._past[device] = plan.past
        usual, alone = self._settings, {}
        # Also of one that is to have more, or has not said that it has: it may not come to that.
        low = [min(one.limit, plan.limit(one)) < one.one_request(usual.page) for one in engines]
        if any(low) or any(one.name in self._asked for one in engines):
            settings = replace(usual, lent=0.0, rest=0.0)
            without = policy.plan(engines, size, past, now, self._rule, settings)
            alone = {
                one.name: max(without.limit(one), one.one_request(usual.page)) for one in engines
            }
        here = {one.name for one in engines}
        others = {name: size for name, size in self._alone.items() if name not in here}
        self._alone = others | alone  # those of other devices are told until these are planned
        if self._alone.keys() - self._told.keys() and not self._dry:
            self._look_once()  # before anybody lends: this loop may be killed at any time
        if self._dry:
            self._say_would(plan.moves, device)
            return plan.notes
        self._carry_out(plan.moves, device, size)
        return plan.notes

    def _carry_out(self, moves: tuple[Move, ...], device: str, size: int) -> None:
        """Lower limits side by side, and raise others as each of these has given."""
        here = {one.engine.name: one for one in self._on(device) if one.engine.answers}
        gives = [move for move in moves if not move.raises and move.name in here]
        # What who has not answered yet may go on to map, whatever its limit says by now.
        before = {move.name: move.before for move in gives}
        failed: set[str] = set()
        with ThreadPoolExecutor(max(1, len(gives))) as pool:
            left = {pool.submit(self._do, here[one.name], one, GIVES): one.name for one in gives}
            while True:
                # Engines that are not asked meanwhile take this loop for killed.
                patience = max(0.0, GETS - (self._clock() - self._seen_at))
                for done in wait(left, patience, FIRST_COMPLETED).done:
                    name = left.pop(done)
                    if not isinstance(done.result(), control.Unanswered):
                        del before[name]
                if gives:
                    self._look_once()
                gets = [move for move in moves if move.name not in failed]
                failed |= self._raise(gets, device, size, before)
                if not left:
                    return

    def _raise(
        self, moves: list[Move], device: str, size: int, before: Mapping[str, int]
    ) -> set[str]:
        """Raise limits by what nobody has; return who has not taken one."""
        size = min(size, self._size_now(device) or size)  # others may have taken memory
        engines = [one.engine for one in self._on(device)]
        after = [replace(one, limit=max(one.limit, before.get(one.name, 0))) for one in engines]
        failed = set()
        for move in policy.grants(moves, after, size, self._settings.page):
            if self._clock() - self._seen_at > GETS:
                break  # this process was stopped, or an engine slow: another look comes first
            if self._do(self.found[move.name], move, GETS):
                failed.add(move.name)
        return failed

    def _rule(self, name: str) -> Terms:
        return self.options.terms_of(name, self.found[name].models)

    def _on(self, device: str) -> list[Found]:
        return [one for one in self.found.values() if one.device == device]

    def _size_now(self, device: str) -> int | None:
        """Return the bytes that engines of a device may map together; None if nobody knows."""
        if self.options.memory is not None:
            return self.options.memory
        here = self._on(device)
        free = [one.free for one in here if one.engine.answers]
        if not free:
            return None
        # Each of them has looked at another time: the least is what is surely free.
        return sum(one.engine.mapped for one in here) + min(free)

    def _size(self, device: str) -> int | None:
        """Return the same as a round before, if the memory seems to have grown a little."""
        size, before = self._size_now(device), self._sizes.get(device)
        if size is None:
            return None
        if before is None or not before <= size <= (1 + STEADY) * before:
            self._sizes[device] = size
        return self._sizes[device]

    def _do(self, found: Found, move: Move, patience: float) -> control.Refused | None:
        """Set a limit of an engine as it was found, and say so; return why it has not taken it."""
        try:
            taken = self._set_limit(found, move.limit, patience)
        except control.Refused as refused:
            if isinstance(refused, control.Unanswered) and move.raises:
                # It may come to it later, when others have the memory.
                self._asked[move.name] = (found.engine.born, found.revision + 1, move.limit)
            self._tell(Event.of(self._wall(), move, False, refused))
            return refused
        page = found.engine.page or self._settings.page  # kvcached keeps whole ones
        if taken // page != move.limit // page:
            move = replace(move, limit=taken, why="its limit was set by somebody else meanwhile")
        self._tell(Event.of(self._wall(), move, False))
        return None

    def _look_once(self) -> None:
        self._told = self._alone
        self._see(self._look(self.found, self._alone))

    def _see(self, now: dict[str, Found]) -> None:
        """Take note of who is there, and say who came, went, or does not answer."""
        for name in sorted(self.found.keys() | now.keys()):
            before, after = self.found.get(name), now.get(name)
            gone = before and (
                after is None or before.engine.born not in (after.engine.born, seen.NEVER)
            )
            if gone:
                self._say(name, "ended")
                self._asked.pop(name, None)
                self._would.pop(name, None)
                self._alone.pop(name, None)
            if after and (gone or not before):
                self._say(name, "appeared", limit=after.engine.limit)
            if after is None:
                continue
            now[name] = after = self._with_asked(after)
            answered = before is None or gone or before.engine.answers
            if answered and not after.engine.answers:
                self._say(name, "silent", after.why_not, after.engine.limit)
            elif not answered and after.engine.answers:
                self._say(name, "answers")
        self.found, self._seen_at = now, self._clock()

    def _with_asked(self, found: Found) -> Found:
        """Count a limit that an engine was asked to take and has not answered for."""
        name = found.engine.name
        if name not in self._asked:
            return found
        born, revision, limit = self._asked[name]
        if born != found.engine.born or found.revision >= revision:
            del self._asked[name]
            return found
        engine = replace(found.engine, limit=max(found.engine.limit, limit))
        return replace(found, engine=engine)

    def _say_would(self, moves: Iterable[Move], device: str) -> None:
        would = {move.name: (move.limit, move.why) for move in moves}
        for move in moves:
            if self._would.get(move.name) != would[move.name]:
                self._tell(Event.of(self._wall(), move, True))
        self._would.update(would)

    def _say(self, name: str, what: str, why: str = "", limit: int = 0) -> None:
        self._tell(Event(self._wall(), name, what, why, limit=limit, dry=self._dry))


def _why_not(device: str, groups: Mapping[str, list[str]]) -> str:
    """Return why the engines of a device are left as they are; empty if they are not."""
    if not device:
        return "it has not said which device it is on, and is left as it is"
    parts = set(device.split(", "))
    for other, names in groups.items():
        if other and other != device and parts & set(other.split(", ")):
            return f"it shares a part of its devices with {', '.join(names)}, and is left as it is"
    return ""
