"""One engine's way to a suspension and back; every method runs on the engine's own thread.

    runs ──> pausing ──> storing ──> releasing ──> suspended ──> resuming ──> runs
                │           │            │                          ^
                └───────────┴── cancel ──┴──────────────────────────┘

pausing     nothing new is scheduled; steps and copies that are under way come to their end
storing     every block with a hash that the tier does not hold is stored, while the requests that
            use it keep it; up to here a suspension can be given up without a trace
releasing   the running requests are preempted, all blocks are freed, the fence lets the pages go
suspended   the limit is at the floor, the pages are on the device for others; requests wait
resuming    the limit is what it was; requests run once kvcached's own thread has read it

What is lost when the engine is killed is what it had: its device memory goes with the process.
Nothing of a suspension outlives it, and nothing of it is anybody else's.
"""

from __future__ import annotations

import threading
import time
import weakref
from enum import Enum
from typing import Any

from kvpatch import state
from kvpatch.logs import log
from kvpatch.patches import deadlock
from kvpatch.patches.secondary_tiers.weights import Calls
from kvpatch.patches.suspend.controller import Controller
from kvpatch.patches.suspend.giving import Giving
from kvpatch.patches.suspend.hold import Hold
from kvpatch.patches.suspend.spill import Spill, cached
from kvpatch.patches.suspend.told import tell
from kvpatch.sizes import readable
from kvpatch.upstream import kvcached_api, kvcached_limits

# Of requests that hold blocks while they wait for more input; nothing but the input moves them.
_STREAMING = "WAITING_FOR_STREAMING_REQ"


class Phase(str, Enum):
    """Where an engine is on its way."""

    RUNS = "runs"
    PAUSING = "pausing"
    STORING = "storing"
    RELEASING = "releasing"
    SUSPENDED = "suspended"
    RESUMING = "resuming"


FREED = (Phase.RELEASING, Phase.SUSPENDED)  # nothing is on the device any more
ON_THE_WAY = (Phase.PAUSING, Phase.STORING, Phase.RELEASING)
STEPPED = (Phase.STORING, Phase.RELEASING, Phase.RESUMING)  # though no request runs


def _phase_of(suspension: Suspension | None) -> str:
    return (Phase.RUNS if suspension is None else suspension.phase).value


class Cannot(Exception):
    """The engine does not do what was asked; the message is one sentence."""


class Suspension:
    """The suspension of an engine; kept on its ``EngineCore``.

    ``spill`` is None without a tier that can be used, and ``why_not`` the end of a sentence.
    """

    def __init__(self, engine: Any, spill: Spill | None, why_not: str = "") -> None:
        self.engine = engine
        self.phase = Phase.RUNS
        self.changed = threading.Condition()  # notified when ``said`` is another dictionary
        self.said: dict[str, Any] = {}  # of the last verb; replaced and never changed
        self.given_up = ""  # why the last suspension is none
        self.by = ""  # who asked last, as the end of a sentence in the log
        self._suspended_at = 0.0
        self.revision = 0  # counts the limits that were set, by whoever asked here
        self._spill = spill
        counts, me = None if spill is None else spill.counts, weakref.ref(self)
        tell(engine, counts, lambda: _phase_of(me()))
        self._why_not = why_not
        self._hold = state.of(engine.scheduler, Hold)
        self._manager = kvcached_api.manager_of(engine)
        self.controller = Controller(kvcached_api.pool_of(engine))
        self._begun = 0.0
        self._deadline = 0.0
        self._finish = False
        self._whole = False
        self._mapped_before = 0
        self._limit = 0  # to be given back at the end
        self._seen = 0  # what /dev/shm said when that was taken up: another value is a later wish
        self._told = 0  # pages that were given back, when that was last told
        self._error = ""
        self._unset = ""  # why the limit is not what it was
        self._tell()

    # What can be asked for

    def why_not(self) -> str:
        """Return why the engine cannot be suspended now, as one sentence; empty if it can."""
        if self._why_not:
            return self._why_not
        streaming = sum(
            request.status.name == _STREAMING
            for request in list(self.engine.scheduler.requests.values())  # on any thread
        )
        if streaming:
            return f"{streaming} of its requests stream their input and hold their blocks"
        calls = state.find(self.engine, Calls)
        if calls is not None and calls.unanswered:
            # The reset that frees the device would be of the CPU tier too.
            return "its weights were replaced, and its caches have not been reset since"
        return ""

    def promised(self) -> int:
        """Return the bytes that it may map, or may again once it is resumed; on any thread."""
        now = kvcached_api.limit(self._manager)
        if self.phase in ON_THE_WAY:
            return max(now, self._limit)
        return self._limit if self.phase is Phase.SUSPENDED and now == self._seen else now

    def suspend(
        self, finish: bool, whole: bool, timeout: float | None, asked: float | None = None
    ) -> None:
        """Begin a suspension, or go on with the one that has begun; raises Cannot.

        Args:
            finish: let running requests finish first.
            whole: not if the tier cannot keep every block.
            timeout: seconds after which the engine runs on; None for no limit.
            asked: when it was asked for, by the monotonic clock; None for now.
        """
        if self.phase in (*ON_THE_WAY, Phase.SUSPENDED):
            self._tell()
            return
        lost = self.plan()["lost"]
        if whole and lost:
            raise Cannot(f"its CPU tier has no room for {lost} blocks")
        self._begin(asked)
        self._deadline = self._begun + timeout if timeout else 0.0
        self._finish, self._whole = finish, whole
        assert self._spill is not None
        self._spill.tier.hold(everything=True)
        states = type(self.engine.scheduler.pause_state)
        self._hold.set(self.engine.scheduler, states.PAUSED_NEW if finish else states.PAUSED_ALL)
        self._go_to(Phase.PAUSING)
        self.advance()

    def release(self) -> None:
        """Begin, or go on with, a suspension of an engine without caches, which needs no tier."""
        if self.phase in (*ON_THE_WAY, Phase.SUSPENDED):
            self._tell()
            return
        self._begin(None)
        if self._spill is not None:
            self._spill.begin(())
        scheduler = self.engine.scheduler
        self._hold.set(scheduler, type(scheduler.pause_state).PAUSED_ALL)
        self._go_to(Phase.RELEASING)
        self.advance()

    def _begin(self, asked: float | None) -> None:
        self._limit = self._seen = kvcached_api.limit(self._manager)
        self._error = self._unset = self.given_up = ""  # of one before it
        self._begun = time.monotonic() if asked is None else asked
        self._mapped_before = self._mapped()

    def plan(self) -> dict[str, Any]:
        """Return what a suspension would keep and lose now, or has kept; Cannot if none can be."""
        why_not = self.why_not()
        if self._spill is None or why_not:
            raise Cannot(why_not)
        self._tell()
        if self.phase in FREED:
            return {name: self.said[name] for name in ("resident", "kept", "partial", "lost")} | {
                "stored_before": self.said["kept"],
                "running": 0,
            }
        blocks = cached(kvcached_api.pool_of(self.engine))
        return self._spill.plan(blocks) | {
            "stored_before": sum(self._spill.holds(one.key) for one in blocks),
            "running": len(self.engine.scheduler.running),
        }

    def resume(self) -> None:
        """Take the memory again, or give a suspension up that has not ended."""
        if self.phase in (Phase.RUNS, Phase.RESUMING):
            self._tell()
            return
        if self.phase in (Phase.PAUSING, Phase.STORING):
            self._cancel("it was resumed before it was suspended")
        else:
            self.given_up = "it was resumed meanwhile"
            self._begun = time.monotonic()
            self._take_back()
        self.advance()

    def limit(self, size: int, revision: int | None = None) -> None:
        """Set the bytes that the engine may map; while it is suspended, from its resumption on.

        Cannot: they are more than it started with, or less than a page, or somebody has set another
        limit since: the revision is one more than the one that the caller knows of.
        """
        if revision is not None and revision <= self.revision:
            raise Cannot(f"its limit was set by somebody else (revision {self.revision})")
        most = kvcached_api.most(self._manager)
        page = kvcached_api.page_bytes(self._manager)
        if size > most:
            raise Cannot(f"it started with {readable(most)} and cannot have more")
        if size < page:
            raise Cannot(f"a page is {readable(page)}, and it needs at least one")
        before, later = self.promised(), ""
        if self.phase in (*ON_THE_WAY, Phase.SUSPENDED):
            self._limit, self._seen = size, kvcached_api.limit(self._manager)
            later = ", from its resumption on"
        else:
            kvcached_api.set_limit(self._manager, size)
            self._unset = ""
        if revision is None:  # not of a controller, which knows its revision
            self.controller.alone = None
        self.revision = self.revision + 1 if revision is None else revision
        if size != before:
            said = readable(before), readable(size), self.by, later
            log.info("kvpatch: the limit was set from %s to %s%s%s", *said)
        self._tell()

    # What happens by itself

    def advance(self) -> None:
        """Go as far as it goes now; called at every step of the engine."""
        try:
            alone = self.controller.advance()
            if alone is not None:
                self.by = " by itself, as its controller is silent"
                self.limit(alone, self.revision + 1)
            if self.phase is Phase.RUNS and self.said.get("lowers") and self._has_given():
                self._tell()
            if self._deadline and self.phase in ON_THE_WAY and time.monotonic() > self._deadline:
                self._time_out()
            while self._move():
                pass
        except Exception as error:
            if kvcached_limits.must_end(error):
                raise
            # Else vLLM goes on: what it has is whole in every phase.
            log.exception("kvpatch: the suspension failed")
            if self.phase is not Phase.RUNS:
                self._give_up(f"it failed with {type(error).__name__}: {error}")

    def _has_given(self) -> bool:
        """Whether a lower limit has given something back since it was last told, or is there."""
        giving = state.find(self._manager, Giving)
        return giving is None or not giving.lowers or giving.given != self._told

    def _pausing(self) -> bool:
        scheduler = self.engine.scheduler
        if self.engine.batch_queue or not self._hold.runs_out(scheduler):
            return False
        if self._finish:
            self._finish = False
            self._hold.set(scheduler, type(scheduler.pause_state).PAUSED_ALL)
        assert self._spill is not None
        self._spill.alone = True
        self._spill.begin(cached(kvcached_api.pool_of(self.engine)))
        self._go_to(Phase.STORING)
        return True

    def _storing(self) -> bool:
        assert self._spill is not None
        # A request that was aborted meanwhile may have had stores of its own.
        if not self._spill.done or self._spill.tier.busy():
            self._tell()
            return False
        if why_not := self.why_not():
            self._cancel(why_not)
            return True
        lost = self._spill.lost()
        if self._whole and lost:
            self._cancel(f"its CPU tier did not take {lost} blocks in")
            return True
        self._release_all()
        self._go_to(Phase.RELEASING)
        return True

    def _release_all(self) -> None:
        scheduler = self.engine.scheduler
        for request in list(scheduler.requests.values()):
            if deadlock.holds(request):
                deadlock.release(scheduler, request)
        # vLLM preempts the running requests, and forgets every block on the device.
        self.engine.reset_prefix_cache(reset_running_requests=True)

    def _releasing(self) -> bool:
        if self._must_tell_preempted() or kvcached_api.has_retired(self._manager):
            return False
        self._look_at_limit()
        try:
            floor = kvcached_api.give_all_back(self._manager)
        except Exception:
            self._seen = kvcached_api.limit(self._manager)  # it may have been lowered
            raise
        if floor is not None:
            self._seen = floor
            self._go_to(Phase.SUSPENDED)
        return False

    def _look_at_limit(self) -> None:
        """Take up a limit that somebody has set since the last one was taken up."""
        now = kvcached_api.limit(self._manager)
        if now != self._seen:
            self._limit = self._seen = now

    def _must_tell_preempted(self) -> bool:
        """Whether a step must name preempted requests first; vLLM fails if it loads one of them."""
        return bool(self.engine.scheduler.reset_preempted_req_ids)

    def _take_back(self) -> None:
        """Set the limit again that the engine has for itself, or let requests run with another."""
        self._look_at_limit()
        try:
            kvcached_api.set_limit(self._manager, self._limit)
        except Exception as error:
            if kvcached_limits.must_end(error):
                raise
            log.exception("kvpatch: a limit could not be set again")
            self._unset = f"its limit could not be set again: {type(error).__name__}: {error}"
        self._go_to(Phase.RESUMING)

    def _resuming(self) -> bool:
        if self._must_tell_preempted():
            return False
        if not self._unset and not kvcached_api.is_applied(self._manager):
            return False  # an allocation would apply an earlier limit
        self._run()
        return False

    def _move(self) -> bool:
        moves = {
            Phase.PAUSING: self._pausing,
            Phase.STORING: self._storing,
            Phase.RELEASING: self._releasing,
            Phase.RESUMING: self._resuming,
        }
        return self.phase in moves and moves[self.phase]()

    # What can go wrong

    def _time_out(self) -> None:
        seconds = self._deadline - self._begun
        self._give_up(f"it was not suspended within {seconds:g} s, in the phase {self.phase.value}")

    def _give_up(self, why: str) -> None:
        if self.phase is Phase.RESUMING:
            self._run(why)
        else:
            self._cancel(why)

    def _cancel(self, why: str) -> None:
        if self._spill is not None:
            self._spill.cancel()
        self._error = why
        self._take_back()

    def _run(self, error: str = "") -> None:
        if self._spill is not None:
            self._spill.alone = False
        self._hold.set(self.engine.scheduler, None)
        self._go_to(Phase.RUNS, error)

    # What is said

    def _go_to(self, phase: Phase, error: str = "") -> None:
        log.debug("kvpatch: suspension: %s -> %s %s", self.phase.value, phase.value, error)
        self.phase = phase
        if self._spill is not None:
            self._spill.counts.suspended(phase is Phase.SUSPENDED)
            if phase is Phase.SUSPENDED:
                found = {"blocks": self._spill.count.resident, "kept": self._spill.kept()}
                self._spill.counts.last = found
            elif phase is Phase.RUNS:
                self._spill.tier.hold(everything=False)
        self._hold.step_for("suspension", phase in STEPPED)
        if phase in (Phase.RUNS, Phase.SUSPENDED):
            self._deadline = 0.0
        if phase is Phase.RUNS:
            error, self._error = error or self._error, ""
            self.given_up = error or self.given_up
        self._tell(error)
        self._log(error)

    def _log(self, error: str) -> None:
        said, now = self.said, time.monotonic()
        if self.phase is Phase.SUSPENDED and self._spill is None:
            self._suspended_at = now
            log.info(
                "kvpatch: released in %.2f s: %s still mapped",
                *(now - self._begun, readable(said["mapped"])),
            )
        elif self.phase is Phase.SUSPENDED:
            self._suspended_at = now
            log.info(
                "kvpatch: suspended%s in %.2f s: %d of %d blocks are in the tier, %s given back, "
                "%s still mapped",
                *(self.by, now - self._begun, said["kept"], said["resident"]),
                *(readable(said["freed"]), readable(said["mapped"])),
            )
        elif self.phase is Phase.RUNS and self._suspended_at:
            log.info(
                "kvpatch: resumed%s after %.1f s, in %.2f s: the limit is %s%s",
                *(self.by, now - self._suspended_at, now - self._begun),
                *(readable(said["limit"]), f"; {error}" if error else ""),
            )
            self._suspended_at = 0.0
        elif self.phase is Phase.RUNS:
            log.info("kvpatch: not suspended: %s", error or self.given_up)

    def _tell(self, error: str = "") -> None:
        spill, mapped = self._spill, self._mapped()
        said: dict[str, Any] = {
            "phase": self.phase.value,
            "limit": kvcached_api.limit(self._manager),
            "mapped": mapped,
            "seconds": round(time.monotonic() - self._begun, 3) if self._begun else 0.0,
        }
        if spill is not None and self.phase is not Phase.RUNS:
            count = spill.count
            said |= {
                "resident": count.resident,
                "missing": count.missing,
                "planned": count.planned,
                "freed": max(0, self._mapped_before - mapped),
            }
            if self.phase in FREED:
                said["partial"] = count.partial
                said |= {"kept": spill.kept(), "lost": spill.lost()}
        giving = state.find(self._manager, Giving)
        if giving is not None:
            said |= {"lowers": giving.lowers, "evicted_without_copy": giving.lost}
            self._told = giving.given
        if error:
            said["error"] = error
        if self._unset and self.phase is Phase.RUNS:
            said["unset"] = self._unset
        with self.changed:
            self.said = said
            self.changed.notify_all()

    def _mapped(self) -> int:
        return kvcached_api.mapped(self._manager)
