"""The phases of a run: the engine computes, evicts, restores, is pressed, and gives back.

Each phase goes on until what it is for has been seen, or for as many rounds as it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvpatch.verify import limit
from kvpatch.verify.api import Answer, Api
from kvpatch.verify.child import Child, Ended
from kvpatch.verify.load import Load
from kvpatch.verify.readings import Readings, mapped, total

MOST = 32  # conversations
FEWEST = 4
ANSWER = 16  # tokens
ROUNDS = 4
TOGETHER = 6
IDLE_SECONDS = 60.0
STEP_SECONDS = 0.5  # the interval of the status page
PREEMPTIONS = "vllm:num_preemptions_total"

Say = Callable[[str], None]


@dataclass
class Seen:
    """What was seen.

    Attributes:
        answers: of every turn, in order; those of one name had one prompt.
        computed, restored: seconds to the first token, of prompts of the same length.
        did: how often the engine did what it must be seen doing.
        pages: the pages in use, at the peak and in the end.
        stored, loaded: bytes, of all workers.
        blocks_loaded: by all workers.
        page_bytes: of one page, all layers.
    """

    conversations: int = 0
    answers: list[Answer] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)
    restored: list[float] = field(default_factory=list)
    did: dict[str, int] = field(default_factory=dict)
    pages: dict[str, int] = field(default_factory=dict)
    page_bytes: int = 0
    stored: int = 0
    loaded: int = 0
    blocks_loaded: int = 0
    metrics: str = ""

    def count(self, what: str, how_often: int) -> None:
        """Note that the engine did something."""
        self.did[what] = self.did.get(what, 0) + how_often


class Drive:
    """One engine under load.

    Args:
        api: of its server.
        child: the command.
        readings: of its processes.
        load: the prompts.
        say: prints progress.
    """

    def __init__(self, api: Api, child: Child, readings: Readings, load: Load, say: Say) -> None:
        self._api, self._child, self._readings = api, child, readings
        self._load, self._say = load, say
        self.seen = Seen()

    def run(self) -> Seen:
        """Run every phase.

        Raises:
            Ended: the engine ended, or does not answer.
        """
        engine = self._readings.engine()
        self.seen.page_bytes = engine["device"]["page_bytes"]
        total_pages = engine["device"]["total_pages"]
        offloads = bool(engine["connector"])
        one = self._compute()
        self._move_limit(one + 2)
        self._restore(offloads)
        self._abort()
        self._press(one)
        self._move_limit(total_pages)
        self._restore(offloads, turn=3)
        self._give_back(offloads)
        self.seen.metrics = self._api.metrics()
        return self.seen

    def _compute(self) -> int:
        """Hold first turns until they fill several pages; return the pages of one."""
        before = mapped(self._state())
        one = 0
        while self.seen.conversations < MOST:
            self.seen.conversations += 1
            answer = self._turn(self.seen.conversations, 1)
            self.seen.computed.append(answer.first)
            pages = mapped(self._state())
            one = one or max(1, pages - before)
            if self.seen.conversations >= FEWEST and pages >= before + one + 4:
                break
        self._peak()
        self._say(
            f"computed {self.seen.conversations} conversations of {answer.prompt_tokens} tokens, "
            f"{self.seen.pages['peak']} pages in use"
        )
        return one

    def _move_limit(self, pages: int) -> None:
        limit.move(self._state()["pool"], pages * self.seen.page_bytes)
        self.seen.count("limit moved", 1)
        self._say(f"kvcached's limit moved to {pages} pages")

    def _restore(self, offloads: bool, turn: int = 2) -> None:
        """Let the conversations return, whose blocks were evicted, until some were restored."""
        name = "restored" if turn == 2 else "restored again"
        for _ in range(ROUNDS):
            for conversation in range(1, self.seen.conversations + 1):
                before = self._loaded()
                answer = self._turn(conversation, turn)
                if self._loaded() > before:
                    self.seen.count(name, 1)
                    self.seen.restored.append(answer.first)
            if self.seen.did.get(name) or not offloads:
                break
        self._say(f"{name}: {self.seen.did.get(name, 0)} conversations")

    def _abort(self) -> None:
        """Leave requests at once, in their first tokens, and while others run."""
        prompts = [
            (self._load.prompt(conversation, 2) + f"\nleaving {after}", after)
            for conversation in range(1, self.seen.conversations + 1)
            for after in (0, 1, 2)
        ]
        before = self._stored()
        self._together(lambda one: self._api.abort(one[0], 64, one[1]), prompts)
        self.seen.count("aborted", len(prompts))
        self._say(f"aborted {len(prompts)} requests")
        self.seen.count("stored under pressure", int(self._stored() > before))

    def _press(self, one: int) -> None:
        """Run requests together that outgrow the limit, until some were preempted."""
        state = self._state()
        pages = state["device"]["total_pages"]
        room = max(1, pages - 1) * self._load.opening // one  # tokens, about
        for attempt in range(ROUNDS):
            before = total(self._api.metrics(), PREEMPTIONS), self._stored()
            share = room // TOGETHER
            prompt = min(share, self._api.longest // 2)
            answer = min(share * (1 + attempt), self._api.longest - prompt - 64)
            count = max(TOGETHER, 2 * room // max(1, prompt + answer))
            prompts = [
                self._load.of(f"pressing {attempt}.{number}", round(0.8 * prompt))
                for number in range(min(count, 64))
            ]
            self._together(partial(self._api.complete, "pressing", tokens=answer), prompts)
            self._peak()
            preempted = int(total(self._api.metrics(), PREEMPTIONS) - before[0])
            self.seen.count("preempted", preempted)
            self.seen.count("stored under pressure", int(self._stored() > before[1]))
            if preempted:
                break
        self._say(f"preempted {self.seen.did['preempted']} requests")

    def _give_back(self, offloads: bool) -> None:
        """Empty the caches of the idle engine, and count the pages that it keeps."""
        deadline = time.monotonic() + IDLE_SECONDS
        self._peak()
        held = mapped(self._state())
        while not self._api.reset(offloads) and time.monotonic() < deadline:
            time.sleep(STEP_SECONDS)
        pages = held
        while time.monotonic() < deadline:
            time.sleep(2 * STEP_SECONDS)
            left = mapped(self._state())
            if left == pages and left < held:
                break
            pages = left
        self.seen.pages |= {"before": held, "after": pages}
        self._say(f"gave back {held - pages} of {held} pages")
        engine = self._state()
        self.seen.stored = int(engine["bytes"]["stored"])
        self.seen.loaded = int(engine["bytes"]["loaded"])
        self.seen.blocks_loaded = self._loaded()

    def _turn(self, conversation: int, turn: int) -> Answer:
        name = f"conversation {conversation}, turn {turn}"
        answer = self._api.complete(name, self._load.prompt(conversation, turn), ANSWER)
        self.seen.answers.append(answer)
        return answer

    def _together(self, call: Callable[[Any], object], prompts: Iterable[Any]) -> None:
        with ThreadPoolExecutor(TOGETHER) as pool:
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
