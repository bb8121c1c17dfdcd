"""The thread of an engine that commits the extents of its tier, and gives them back.

Whatever waits for the kernel, for the ledger or for workers is done here, and never under the
lock that the scheduler needs.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from kvpatch.logs import log
from kvpatch.pool import worth
from kvpatch.pool.extents import Extents
from kvpatch.pool.ledger import Busy, Foreign, Peer
from kvpatch.pool.member import Different, Member, Promised, View
from kvpatch.pool.memory import Memory
from kvpatch.pool.ranks import Failed, Ranks

TICK = 0.1  # seconds between two looks, while something is wanted
# Seconds between two looks at most, if nothing is wanted: a look keeps all other engines out of the
# ledger. Engines that were started together do not look together.
AT_REST = 1.0
SOON = 0.02  # seconds between two looks while another engine is asked, for a second at most
# Seconds that a store waits for an extent before the policy evicts for it instead.
PATIENCE = 2.0
# Seconds that an engine has to give what it was asked for, and for which it is passed over then.
TO_GIVE, PASSED_OVER = 1.0, 10.0
# Seconds by which another engine's coldest extent must be older than the own one.
OLDER = 1.0
AT_ONCE = 4  # extents that another engine is asked for
PER_TURN = 8  # extents that are committed, or given back, between two looks
# Seconds after which what failed is tried again.
AGAIN = 10.0
REMOVED = "its record was removed"
# An extent is committed ahead while fewer chunks are free than this part of one, or than were
# stored within one WINDOW of the last RECENT seconds: a request that ends has one step to store.
AHEAD, WINDOW, RECENT = 16, 0.25, 5.0


class Keeper:
    """What an engine does with its tier's extents.

    Args:
        extents: of the tier.
        memory: of the tier.
        member: the engine's part in the ledger.
        ranks: the engine's workers.
        lock: of the extents and of the scheduler; what is done under it is short.
        evict: evicts what it can of an extent, under the lock.

    Attributes:
        evicted: blocks of extents that had to go, for people.
        evicts: whether blocks were offered in this step that are evicted for who takes them.
        view: the last look at the ledger.
        broken: why no extent is committed now; empty if nothing failed.
    """

    def __init__(
        self,
        extents: Extents,
        memory: Memory,
        member: Member,
        ranks: Ranks,
        lock: AbstractContextManager[object],
        evict: Callable[[int], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.extents, self.memory, self.member, self.ranks = extents, memory, member, ranks
        self.lock, self._evict, self._clock = lock, evict, clock
        self.evicted = 0
        self.evicts = False
        self.view: View | None = None
        self.broken = ""
        self._broken_until = 0.0
        self._told = ""  # to the log
        self._doubtful: set[int] = set()  # committed extents that a worker may have registered
        self._room = True
        self._coldest = 0.0  # at the last look
        self._looked_at, self._rest = float("-inf"), AT_REST
        self._wanted = 0
        self._wanted_at = self._waits_since = float("-inf")
        self._quiet_until = float("-inf")
        self._window, self._window_at = 0, float("-inf")
        self._most, self._most_at = 0, float("-inf")
        self._asked: dict[str, tuple[float, int]] = {}  # record: when, and what it had
        self._passed_over: dict[str, float] = {}  # record: until when
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # For the scheduler, under the lock

    def need(self, chunks: int) -> bool:
        """Note that a store needs so many chunks.

        Returns:
            Whether it shall wait for a later step; if not, the policy may evict for it.
        """
        now = self._clock()
        if chunks <= self.extents.free:
            self._remember(chunks, now)
            if chunks >= self._wanted:  # else another store waits for more
                self._wanted, self._wanted_at = 0, float("-inf")
            return False
        if now - self._wanted_at > PATIENCE:
            self._waits_since = now
        self._wanted, self._wanted_at = max(chunks, self._waited_for), now
        if now - self._looked_at > 2 * TICK:
            self._room = True  # as far as is known: the thread looks first
        if self._room:  # of a full pool a look every TICK is enough
            self._wake.set()
        return self.grows and now - self._waits_since < PATIENCE

    @property
    def grows(self) -> bool:
        """Whether more chunks can be committed, as far as is known."""
        return self._room and not self.broken and self.extents.absent() is not None

    def reset(self) -> None:
        """Take every chunk back; nothing is kept ahead for what was stored."""
        self.extents.reset()
        self._window = self._most = 0
        self._wake.set()

    def wake(self) -> None:
        """Have the thread look now."""
        self._wake.set()

    def _remember(self, chunks: int, now: float) -> None:
        if now - self._window_at > WINDOW:
            self._window, self._window_at = 0, now
        self._window += chunks
        if self._window >= self._most or now - self._most_at > RECENT:
            self._most, self._most_at = self._window, now

    # For people

    def describe(self) -> dict[str, object]:
        """Return the engine's part in the pool; from any thread, without waiting for a step."""
        view, now = self.view, self._clock()
        # An extent that holds nothing is older than any machine.
        coldest = self._coldest if self._coldest >= 1 else None
        return {
            "committed": self.member.committed,
            "resident": self.extents.used * self.extents.chunk_bytes,
            "ceiling": self.extents.chunks * self.extents.chunk_bytes,
            "floor": self.member.floor,
            "pool": view.total if view is not None else self.member.committed,
            "limit": view.limit if view is not None else 0,
            "engines": 1 + (len(view.peers) if view is not None else 0),
            "coldest": None if coldest is None else max(0.0, now - coldest),
            "evicted": self.evicted,
            "broken": self.broken,
        }

    # The thread

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="kvpatch-pool-keeper", daemon=True)
        self._thread.start()

    def close(self, in_use: bool = False) -> None:
        """End the thread and give everything back; no copy is in flight any more.

        Args:
            in_use: somebody in this process still reads or writes the tier. All of it stays
                committed and counted, and goes with the process.
        """
        self._stop.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self.ranks.close()
        if in_use:
            log.warning(
                "kvpatch: a disk does not answer; the CPU tier stays until its process ends"
            )
            return
        for index in (*self.extents.open, *self._doubtful):
            offset, size = self.extents.place(index)
            self.memory.punch(offset, size)
            self.member.give(size)
        self.extents.open.clear()
        self._doubtful.clear()
        self.memory.close()
        self.member.leave()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.turn()
            except Exception as error:  # the engine goes on with the extents that it has
                self._break(f"{type(error).__name__}: {error}", error, AGAIN)
                self._stop.wait(1.0)
            while not self._wake.wait(SOON if self._asked else TICK) and self.rests:
                pass
            self._wake.clear()

    @property
    def rests(self) -> bool:
        """Whether nothing has to be done now, as far as can be told without the ledger's lock."""
        with self.lock:
            extents = self.extents
            wants = self._waited_for or (self.grows and extents.free < self._ahead)
            goes = extents.going or extents.closed()
        late = self._clock() - self._looked_at >= self._rest
        return not (late or wants or goes or self._asked or self.member.called)

    def turn(self) -> None:
        """Look at the ledger once, and do what has to be done."""
        self._looked_at, self._rest = self._clock(), random.uniform(AT_REST / 2, AT_REST)
        with self.lock:
            resident = self.extents.used * self.extents.chunk_bytes
            # What is kept ahead goes first, and says nothing of the age of the others.
            self._coldest = self.extents.last_use_of_held() or self.extents.last_use()
            reuse = self.extents.reuse.rate
        try:
            view = self.view = self.member.look(resident, self._coldest, reuse)
        except (Busy, Foreign):
            self._room = False  # no store waits for what may not come
            return
        if not self.member.counted:
            self._join_again()
        self._hear(view)
        self._make_room(view)
        self._return_idle()
        self._grow(view)

    def _join_again(self) -> None:
        """Take part again, a while after the record was removed, and with nothing committed."""
        if self.broken != REMOVED:
            self._break(REMOVED, None, AGAIN)
        elif not self.member.committed and self._clock() >= self._broken_until:
            try:
                self.member.join_again()
            except (Different, Promised, Foreign, OSError) as error:  # Busy is one
                log.debug("kvpatch: the host pool is not joined again: %r", error)
                self._broken_until = self._clock() + AGAIN

    # Giving back

    def _make_room(self, view: View) -> None:
        """Evict extents that the others, or a lower limit, ask for."""
        share = self._share(view)
        # Whole extents: one that would take it below its floor is not given to another engine.
        asked = min(view.asked, max(0, view.own - self.member.floor))
        due = max(asked, share)
        with self.lock:
            extents, going, drained = self.extents, self.extents.going, 0
            # A step of the scheduler evicts what is in them.
            while going < due and (drained < PER_TURN or going < asked):
                index = extents.coldest()
                if index is None:
                    break
                size = extents.place(index)[1]
                kept = view.own - going - size >= self.member.floor
                if going >= share and not kept:
                    break
                extents.drain(index)
                drained += 1
                going += size
            draining = extents.draining()
        for index in draining:
            with self.lock:  # one at a time: a step of the scheduler may wait for it
                self.evict(index)
        if drained and going < due and not extents.draining():
            self._wake.set()
        if due:
            self._quiet_until = self._clock() + TO_GIVE
        if view.asked:
            self.member.answer()

    def evict(self, index: int) -> None:
        """Evict what can be evicted of an extent, under the lock."""
        self.evicted += self._evict(index)

    def _share(self, view: View) -> int:
        """Return what this engine has to give back of what is over the limit, in bytes."""
        over = view.total - view.limit
        if over <= 0:
            return 0
        now = self._clock()
        answering = [one.owner for one in view.peers if one.answers(now)]
        own, others = max(0, view.own - self.member.floor), sum(one.lends for one in answering)
        if own + others < over:  # the floors are more than the limit
            own, others = view.own, sum(one.committed for one in answering)
        return -(-over * own // max(1, own + others))

    def _return_idle(self) -> None:
        """Give back every idle extent that has to go, and others that are not needed ahead."""
        with self.lock:
            extents = self.extents
            closed, ahead = extents.closed(), max(self._ahead, self._waited_for)
            for index in extents.idle():
                if len(closed) >= PER_TURN:
                    self._wake.set()
                    break
                left = extents.free - len(extents.open[index].free)
                if extents.open[index].draining or left >= ahead:
                    extents.close(index)
                    closed.append(index)
        for index in closed:
            offset, size = self.extents.place(index)
            try:
                self.ranks.deregister(offset, size)
            except Failed as error:
                self._break(str(error), error, AGAIN)
                return  # it stays committed, and counted
            self.memory.punch(offset, size)
            self.member.give(size)
            with self.lock:
                self.extents.remove(index)

    # Growing

    @property
    def _waited_for(self) -> int:
        """How many chunks the store that waits needs, or needed a moment ago."""
        return self._wanted if self._clock() - self._wanted_at < PATIENCE else 0

    @property
    def _ahead(self) -> int:
        """How many chunks are kept free, if the pool has room for them."""
        recent = self._most if self._clock() - self._most_at <= RECENT else 0
        return max(1, self.extents.per // AHEAD, recent)

    def _grow(self, view: View) -> None:
        """Commit the extents that are wanted, or one ahead."""
        now = self._clock()
        if self.broken and now < self._broken_until:
            return
        if not self._undo():
            return
        self.broken = ""
        if now < self._quiet_until:
            return  # what was given is theirs who asked
        for _ in range(PER_TURN):
            with self.lock:
                index = self.extents.absent()
                free = self.extents.free
                wanted = self._waited_for
                pressed = self.extents.going > 0
            if index is None:
                return
            offset, size = self.extents.place(index)
            ahead = free < self._ahead and not pressed
            if wanted <= free and not ahead:
                self._room = view.total + size <= view.limit
                return
            # What is seen to be full is not tried: that takes the lock.
            full = view.total - view.own + self.member.committed + size > view.limit
            if full or not self.member.take(size):
                self._room = False
                if wanted > free:
                    extents = -(-(wanted - free) // self.extents.per)
                    self._ask(view, size * min(extents, AT_ONCE), now)
                return
            self._room = True
            if not self._commit(index, offset, size):
                return
        self._wake.set()

    def _commit(self, index: int, offset: int, size: int) -> bool:
        try:
            self.memory.commit(offset, size)
        except OSError as error:
            self.member.give(size)
            self._room = False
            self._break(f"no memory can be committed ({error.strerror})", error, AGAIN)
            return False
        try:
            self.ranks.register(offset, size)
        except Failed as error:
            self._break(str(error), error, AGAIN)
            self._doubtful.add(index)
            self._undo()
            return False
        self._told = ""
        with self.lock:
            self.extents.add(index)
            self._waits_since = self._clock()
        return True

    def _undo(self) -> bool:
        """Give back what not every worker registered, once all of them have let go of it.

        Returns:
            False if one has not: that extent stays committed, and counted.
        """
        for index in list(self._doubtful):
            offset, size = self.extents.place(index)
            try:
                self.ranks.deregister(offset, size)
            except Failed as error:
                self._break(str(error), error, AGAIN)
                return False
            self.memory.punch(offset, size)
            self.member.give(size)
            self._doubtful.discard(index)
        return True

    def _ask(self, view: View, size: int, now: float) -> None:
        """Ask the engine with the oldest extent of the machine for some, if it is another's.

        Own extents that hold nothing do not count: they are filled before anything is evicted.
        Below its floor an engine asks whatever the age of its own.
        """
        if self._asked:
            return
        with self.lock:
            used, reuse = self.extents.last_use_of_held(), self.extents.reuse.rate
        below = self.member.floor - self.member.committed
        if below > 0:
            used, size = 0.0, min(size, below)
        # As if it had what it asks for: at an equal part it does not take for being below it.
        own = worth.age(now - used, reuse, view.own + size, view.part) if used else float("-inf")
        ages = [
            (worth.age(now - had.coldest, had.reuse, had.committed, view.part), peer)
            for peer in view.peers
            if self._may_ask(peer, now)
            for had in (peer.owner,)
        ]
        if not ages:
            return
        oldest, victim = max(ages, key=lambda one: one[0])
        if oldest > own + OLDER:
            self._asked[victim.path.name] = now, victim.owner.committed
            self.member.ask(victim, size)

    def _hear(self, view: View) -> None:
        """Note who has given what it was asked for, and who has not in time.

        With every look: later on, who gave may have taken something else.
        """
        now = self._clock()
        for name, (at, had) in list(self._asked.items()):
            peer = next((one for one in view.peers if one.path.name == name), None)
            if peer is None or peer.owner.committed < had:
                del self._asked[name]  # it is gone, or has answered
            elif now - at > TO_GIVE:
                del self._asked[name]
                self._passed_over[name] = now + PASSED_OVER

    def _may_ask(self, peer: Peer, now: float) -> bool:
        owner = peer.owner
        return (
            peer.answers(now)
            and owner.lends > 0
            and owner.coldest > 0
            and self._passed_over.get(peer.path.name, 0) < now
        )

    def _break(self, why: str, error: BaseException | None, again: float) -> None:
        if why != self._told:
            log.error("kvpatch: the host pool commits no memory now: %s", why, exc_info=error)
        self.broken = self._told = why
        self._broken_until = self._clock() + again
