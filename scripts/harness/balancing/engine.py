"""One engine of the simulation: requests, blocks on the device, blocks in its CPU tier.

Blocks have 512 tokens, and pages are not modelled. The first request of a queue is admitted when
the device has room for its prompt; a step computes a part of the prompts and four tokens of every
answer. What is computed is stored in the tier at once.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from harness.balancing.traces import BLOCK, Turn

TOGETHER = 64  # requests that run at a time
TOKENS = 8192  # of prompts in a step
ANSWER = 4  # tokens of each answer in a step


@dataclass
class Request:
    """A turn on its way."""

    turn: Turn
    came: float
    done: Callable[[float], None]
    left: int = 0  # tokens of the prompt to compute
    ready: float = 0.0  # when what is loaded is there
    made: int = 0  # tokens of the answer
    own: int = 0  # blocks that are nobody's prefix
    first: float | None = None  # seconds to the first token
    looked: bool = False

    @property
    def blocks(self) -> int:
        """Blocks that it needs with what it has made, and a next token."""
        return (self.turn.prompt + self.made) // BLOCK + 1


@dataclass
class Measured:
    """What became of an engine's requests."""

    first: list[float] = field(default_factory=list)
    tokens: int = 0  # of prompts and answers


class Engine:
    """An engine.

    Args:
        name: of its model.
        bytes_of_block: of 512 tokens, all layers.
        tier: blocks of its CPU tier.
        cached: most blocks that it keeps for nobody; None for all that fit.
        longest: tokens of its longest request.

    Attributes:
        room: returns how many blocks it may map now.
        make_room: called when it has mapped blocks, for who evicts those of others.
        loads: bytes per second from the tier.
    """

    loads = 20e9

    def __init__(
        self, name: str, bytes_of_block: int, tier: int, cached: int | None, longest: int
    ) -> None:
        self.name = name
        self.longest = longest
        self.bytes_of_block = bytes_of_block
        self.room: Callable[[], int] = lambda: 0
        self.make_room: Callable[[], None] = lambda: None
        self._now = 0.0
        self.queue: deque[Request] = deque()
        self.running: list[Request] = []
        self.used: Counter[int] = Counter()
        self.unused: OrderedDict[int, float] = OrderedDict()  # and since when
        self.own = 0
        self.tier: OrderedDict[int, None] = OrderedDict()
        self.tier_room = tier
        self.cached = cached
        self.measured = Measured()
        self.found = 0.0  # bytes of prompts that were found on the device or in the tier

    @property
    def mapped(self) -> int:
        """Blocks on the device."""
        return len(self.used) + len(self.unused) + self.own

    @property
    def needs(self) -> int:
        """Blocks for its requests, those that wait included."""
        return sum(one.blocks for one in (*self.running, *self.queue))

    def shrink(self, blocks: int) -> None:
        """Keep no more blocks for nobody than this."""
        while self.unused and self.mapped > blocks:
            self.unused.popitem(last=False)

    def _take(self, count: int) -> bool:
        """Make room for some blocks."""
        free = self.room() - self.mapped
        if free + len(self.unused) < count:
            return False
        for _ in range(count - max(0, free)):
            self.unused.popitem(last=False)
        return True

    def admit(self, now: float) -> None:
        """Let requests run for which there is room."""
        while self.queue and len(self.running) < TOGETHER:
            request = self.queue[0]
            keys = request.turn.keys
            hits = 0
            while hits < len(keys) and (keys[hits] in self.used or keys[hits] in self.unused):
                hits += 1
            loaded = hits
            while loaded < len(keys) and keys[loaded] in self.tier:
                loaded += 1
            for key in keys[:hits]:  # so that they are not evicted for what follows
                self.unused.pop(key, None)
                self.used[key] += 1
            if not self._take(request.blocks - hits):
                self._release(keys[:hits])
                return
            self.queue.popleft()
            for key in keys[hits:]:
                self.unused.pop(key, None)
                self.used[key] += 1
            request.own = request.blocks - len(keys)
            self.own += request.own
            self.make_room()
            for key in keys[:loaded]:
                if key in self.tier:
                    self.tier.move_to_end(key)
            size = (loaded - hits) * self.bytes_of_block
            request.ready = now + size / self.loads
            # The last token is always computed.
            request.left = max(1, request.turn.prompt + request.made - loaded * BLOCK)
            if not request.looked:
                request.looked = True
                self.found += loaded * self.bytes_of_block
            self.running.append(request)

    def step(self, now: float) -> tuple[int, int]:
        """Plan a step; return the tokens of prompts and the answers that it computes."""
        self._now = now
        self.admit(now)
        left, answers = TOKENS, 0
        for request in self.running:
            if request.ready > now:
                continue
            if request.left > 0:
                part = min(left, request.left)
                request.left -= part
                left -= part
            else:
                answers += 1
                request.made += ANSWER
        return TOKENS - left, answers

    def end(self, now: float) -> None:
        """End a step."""
        self._now = now
        for request in list(self.running):
            if request.left > 0 or request.ready > now:
                continue
            if request.first is None:
                request.first = now - request.came
                self.measured.first.append(request.first)
                self._store(request.turn.keys)
            if request.made >= request.turn.output:
                self._finish(request, now)
        self._grow()

    def _grow(self) -> None:
        """Give answers the blocks that they need, and preempt who came last if there are none."""
        for request in list(self.running):
            while request in self.running and request.left <= 0:
                missing = request.blocks - len(request.turn.keys) - request.own
                if missing <= 0:
                    break
                if self._take(missing):
                    request.own += missing
                    self.own += missing
                    self.make_room()
                else:
                    self._preempt(self.running[-1])

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        self.queue.appendleft(request)

    def _finish(self, request: Request, now: float) -> None:
        self.running.remove(request)
        self._free(request)
        self.measured.tokens += request.turn.prompt + request.turn.output
        request.done(now)

    def _free(self, request: Request) -> None:
        self.own -= request.own
        request.own = 0
        self._release(request.turn.keys)
        self.shrink(self.room())
        if self.cached is not None:
            while len(self.unused) > self.cached:
                self.unused.popitem(last=False)

    def _release(self, keys: tuple[int, ...]) -> None:
        for key in reversed(keys):  # the end of a prompt goes first
            self.used[key] -= 1
            if not self.used[key]:
                del self.used[key]
                self.unused[key] = self._now

    def _store(self, keys: tuple[int, ...]) -> None:
        for key in reversed(keys):
            self.tier[key] = None
            self.tier.move_to_end(key)
        while len(self.tier) > self.tier_room:
            self.tier.popitem(last=False)
