"""The phases of a run: the engine computes, evicts, restores, is pressed, and gives back.

Each phase goes on until what it is for has been seen, or for as many rounds as it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvpatch import host_memory
from kvpatch.pool import ledger
from kvpatch.sizes import readable
from kvpatch.verify import limit
from kvpatch.verify.api import Answer, Api
from kvpatch.verify.child import Child, Ended
from kvpatch.verify.load import Load
from kvpatch.verify.readings import Readings, mapped, total

MOST = 64  # conversations
FEWEST = 4
ANSWER = 16  # tokens
ROUNDS = 4
TOGETHER = 6
IDLE_SECONDS = 60.0
KEPT_PAGES = 2  # of an engine without requests and cache: that of block 0, and one being freed
STEP_SECONDS = 0.5  # the interval of the status page
PREEMPTIONS = "vllm:num_preemptions_total"

Say = Callable[[str], None]


class Arms(NamedTuple):
    """What a run does besides, because the command has it and a lifted refusal asks for it."""

    sleeps: bool = False
    pool: Path | None = None  # the folder of its host pool, whose limit moves


@dataclass
class Seen:
    """What was seen."""

    conversations: int = 0
    answers: list[Answer] = field(default_factory=list)  # of every turn, in order
    computed: list[float] = field(default_factory=list)  # to the first token
    restored: list[float] = field(default_factory=list)
    did: dict[str, int] = field(default_factory=dict)  # how often each
    pages: dict[str, int] = field(default_factory=dict)  # in use, at the peak and in the end
    fence: dict[str, int] = field(default_factory=dict)  # of ``fence.Counters``
    page_bytes: int = 0  # of all layers
    stored: int = 0  # bytes, of all workers, as loaded ones
    loaded: int = 0
    blocks_loaded: int = 0
    taken: int = 0  # bytes that a host pool took back, and by which the machine had more then
    freed: int = 0
    metrics: str = ""

    def count(self, what: str, how_often: int) -> None:
        """Note that the engine did something."""
        self.did[what] = self.did.get(what, 0) + how_often


class Drive:
    """One engine under load."""

    def __init__(
        self,
        api: Api,
        child: Child,
        readings: Readings,
        load: Load,
        block: int,
        say: Say,
        arms: Arms,
    ) -> None:
        self._arms = arms
        self._api, self._child, self._readings = api, child, readings
        self._load, self._block, self._say = load, block, say
        self._page_tokens = 1
        self.seen = Seen()

    def run(self) -> Seen:
        """Run every phase, or raise Ended."""
        engine = self._readings.engine()
        self.seen.page_bytes = engine["device"]["page_bytes"]
        total_pages = engine["device"]["total_pages"]
        offloads = bool(engine["connector"])
        pages = self._compute()
        self._move_limit(pages)
        self._restore(offloads)
        self._abort()
        self._press(pages)
        if self._arms.sleeps:
            self._sleep()
        if self._arms.pool is not None and engine["host_pool"]:
            self._take_back(self._arms.pool)
        self._move_limit(total_pages)
        self._restore(offloads, 3, "restored again")
        self._give_back()
        self.seen.metrics = self._api.metrics()
        return self.seen

    def _compute(self) -> int:
        """Hold as many first turns as evict each other; return the pages for too few of them."""
        before = mapped(self._state())
        self._first_turn()
        pages = self._pages_for(self._load.opening * 3 // 2, before)
        room = pages * self._page_tokens // self._load.opening  # conversations
        while self.seen.conversations < min(MOST, max(FEWEST, room + 3)):
            self._first_turn()
        self._peak()
        self._say(
            f"computed {self.seen.conversations} conversations of "
            f"{self.seen.answers[-1].prompt_tokens} tokens, {self.seen.pages['peak']} pages in use"
        )
        return pages

    def _first_turn(self) -> None:
        self.seen.conversations += 1
        self.seen.computed.append(self._turn(self.seen.conversations, 1).first)

    def _pages_for(self, tokens: int, before: int) -> int:
        """Return pages in which one request of so many tokens runs, beside that of block 0."""
        # vLLM launches a store in a later step, and counts it in one after that.
        self._api.complete("a step", "a", tokens=4)
        state = self._state()
        stored, size = self._stored(), state["bytes"]["stored"]
        if stored and size:  # both of all workers
            blocks = state["device"]["page_bytes"] * stored // size
            self._page_tokens = max(1, blocks * self._block)
        else:
            used = max(1, mapped(state) - before)
            self._page_tokens = max(1, self._load.opening // used)
        return -(-tokens // self._page_tokens) + 2

    def _move_limit(self, pages: int) -> None:
        limit.move(self._state()["pool"], pages * self.seen.page_bytes)
        self.seen.count("limit moved", 1)
        self._say(f"kvcached's limit moved to {pages} pages of {self._page_tokens} tokens")

    def _restore(self, offloads: bool, turn: int = 2, name: str = "restored") -> None:
        """Let the conversations return, whose blocks were evicted, until some were restored."""
        self.seen.count(name, 0)
        for _ in range(ROUNDS):
            for conversation in range(1, self.seen.conversations + 1):
                before = self._loaded()
                answer = self._turn(conversation, turn)
                if self._loaded() > before:
                    self.seen.count(name, 1)
                    self.seen.restored.append(answer.first)
            if self.seen.did[name] or not offloads:
                break
        self._say(f"{name}: {self.seen.did[name]} conversations")

    def _sleep(self) -> None:
        """Sleep at both levels, while what was answered last may still be being stored."""
        for level in (1, 2):
            self._turn(1, 2)
            self._api.sleep(level)
            self._restore(True, name=f"restored after a sleep of level {level}")

    def _take_back(self, pool: Path) -> None:
        """Let the host pool take memory back from the engine as it runs, and give it again."""
        shown, before, free = ledger.show(pool), self._committed(), host_memory.here().available
        assert shown is not None, f"no engine is in the pool {pool}"
        ledger.set_limit(pool, before // 2)
        for _ in range(ROUNDS):
            self._round()
            if self._committed() <= before // 2:
                break
        taken = self.seen.taken = before - self._committed()
        self.seen.freed = host_memory.here().available - free
        self.seen.count("taken back by the host pool", int(taken > 0))
        ledger.set_limit(pool, shown[0].configured)
        self._round()  # stores into what is committed again
        again = int(self._committed() > before - taken)
        self.seen.count("given again by the host pool", again)
        self._say(f"the host pool took {readable(taken)} of {readable(before)} back")
        self._restore(True, name="restored from memory that was taken back")

    def _round(self) -> None:
        for conversation in range(1, self.seen.conversations + 1):
            self._turn(conversation, 2)

    def _committed(self) -> int:
        return int(self._state()["host_pool"]["committed"])

    def _abort(self) -> None:
        """Leave requests at once, in their first tokens, and while others run."""
        prompts = [
            (self._load.prompt(conversation, 2) + f"\nleaving {after}", after)
            for conversation in range(1, min(FEWEST * 2, self.seen.conversations) + 1)
            for after in (0, 1, 2)
        ]
        before = self._stored()
        self._together(lambda one: self._api.abort(one[0], 64, one[1]), prompts)
        self.seen.count("aborted", len(prompts))
        self._say(f"aborted {len(prompts)} requests")
        self.seen.count("stored under pressure", int(self._stored() > before))

    def _press(self, pages: int) -> None:
        """Run requests together that outgrow the limit, until some were preempted."""
        room = (pages - 1) * self._page_tokens
        longest = self._api.longest - 64
        count = min(MOST, max(TOGETHER, -(-16 * room // (9 * longest))))
        for attempt in range(ROUNDS):
            preempted, stored = self._preempted(), self._stored()
            prompt = min(6 * room // (10 * count), longest * 4 // 10)
            answer = max(1, min((10 + 7 * attempt) * room // (10 * count), longest - prompt))
            texts = [
                self._load.of(f"pressing {attempt}.{number}", prompt) for number in range(count)
            ]
            ask = partial(self._api.complete, "pressing", tokens=answer)
            self._together(ask, texts)
            self._peak()
            self.seen.count("preempted", self._preempted() - preempted)
            self.seen.count("stored under pressure", int(self._stored() > stored))
            if self.seen.did["preempted"]:
                break
        self._say(f"preempted {self.seen.did['preempted']} requests of {count} together")

    def _preempted(self) -> int:
        return int(total(self._api.metrics(), PREEMPTIONS))

    def _give_back(self) -> None:
        """Empty the cache of the idle engine, and count the pages that it keeps."""
        self._peak()
        held = mapped(self._state())
        deadline = time.monotonic() + IDLE_SECONDS
        while not self._api.reset() and time.monotonic() < deadline:
            time.sleep(STEP_SECONDS)
        while (pages := mapped(self._state())) > KEPT_PAGES and time.monotonic() < deadline:
            time.sleep(STEP_SECONDS)
        self.seen.pages |= {"before": held, "after": pages}
        self._say(f"gave back {held - pages} of {held} pages")
        engine = self._state()
        self.seen.fence = dict(engine.get("fence") or {})
        self.seen.stored = int(engine["bytes"]["stored"])
        self.seen.loaded = int(engine["bytes"]["loaded"])
        self.seen.blocks_loaded = self._loaded()

    def _turn(self, conversation: int, turn: int) -> Answer:
        name = f"conversation {conversation}, turn {turn}"
        answer = self._api.complete(name, self._load.prompt(conversation, turn), ANSWER)
        self.seen.answers.append(answer)
        return answer

    def _together(self, call: Callable[[Any], object], prompts: Iterable[Any]) -> None:
        with ThreadPoolExecutor(MOST) as pool:
            list(pool.map(call, prompts))

    def _state(self) -> dict[str, Any]:
        """Return the engine's state once it is idle, and as it is after its last step."""
        deadline = time.monotonic() + IDLE_SECONDS
        while True:
            self._child.check()
            if violation := self._child.violation:
                raise Ended(violation)
            time.sleep(STEP_SECONDS)
            engine = self._readings.engine()
            busy = engine["requests"]["running"] + engine["requests"]["waiting"]
            if not busy or time.monotonic() > deadline:
                return engine

    def _stored(self) -> int:
        return sum(audit["stored"] for audit in self._readings.audits())

    def _loaded(self) -> int:
        return sum(audit["loaded"] + audit["unverified"] for audit in self._readings.audits())

    def _peak(self) -> None:
        self.seen.pages["peak"] = max(self.seen.pages.get("peak", 0), mapped(self._state()))
