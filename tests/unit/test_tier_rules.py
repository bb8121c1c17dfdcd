"""The tiers' rules that need no vLLM: when a tier is late, and what waits behind what."""

import errno
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from fakes import raising

from kvpatch.environ import TIER_PATIENCE
from kvpatch.patches.secondary_tiers import fingerprint, legacy, promotion
from kvpatch.patches.secondary_tiers.admission import around_build, around_matched_tokens
from kvpatch.patches.secondary_tiers.timeout import Unanswered, patience, progressed
from kvpatch.refusal import Refusal
from kvpatch.upstream import connectors


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def unanswered(clock):
    return Unanswered(10, clock)


def test_a_tier_is_late_while_its_oldest_question_has_no_answer_in_time(clock, unanswered):
    assert not unanswered.late
    unanswered.asked("a")
    clock.now = 9
    unanswered.asked("b")
    assert not unanswered.late
    clock.now = 10.5
    assert unanswered.late
    unanswered.answered("a")
    assert not unanswered.late
    clock.now = 19.5
    assert unanswered.late
    unanswered.answered("b")
    unanswered.answered("never asked")
    assert not unanswered.late
    unanswered.asked("again")
    unanswered.asked("c")
    clock.now = 25
    unanswered.asked("again")
    clock.now = 30
    assert unanswered.late
    unanswered.answered("c")
    assert not unanswered.late


def test_a_task_is_pending_from_its_start_and_again_from_every_block(clock, unanswered):
    """A disk with a long queue responds: nothing that waits in the queue is late."""
    seen = []

    def task():
        for now in (9, 18, 27):
            clock.now = now
            seen.append(unanswered.late)
            progressed(0)
        clock.now = 38
        seen.append(unanswered.late)

    unanswered.run("job", task)
    assert seen == [False, False, False, True]
    assert not unanswered.late
    with pytest.raises(OSError):
        unanswered.run("failing", raising(OSError))
    for now in (100, 200):
        clock.now = now
        assert not unanswered.late
        progressed(0)  # of no task


class Changing(dict):
    """A dictionary that another thread changes the first time that it is iterated over."""

    reads = 0

    def values(self):
        self.reads += 1
        if self.reads == 1:
            raise RuntimeError("dictionary changed size during iteration")
        yield from super().values()


def test_a_change_by_another_thread_makes_no_tier_late():
    unanswered = Unanswered(10)
    unanswered._since = Changing()
    unanswered.asked("a")
    assert not unanswered.late
    assert unanswered._since.reads == 2


@pytest.mark.parametrize(
    ("text", "seconds"), [("", 10), ("0.5", 0.5), ("30", 30), (" 5 ", 5), (" ", 10)]
)
def test_patience_is_a_number_of_seconds(monkeypatch, text, seconds):
    monkeypatch.setenv(TIER_PATIENCE.name, text)
    assert patience() == seconds


def test_no_load_starts_behind_a_request_that_waits_until_the_next_step():
    planner = SimpleNamespace()

    def ask(tokens, loads):
        return around_matched_tokens(lambda: (tokens, loads), planner, (), {})

    assert ask(640, True) == (640, True)
    assert ask(None, False) == (None, False)
    assert ask(640, True) == (None, False)
    # What is computed holds memory only while it runs.
    assert ask(0, False) == (0, False)
    assert around_build(lambda: "meta", planner, (), {}) == "meta"
    assert ask(640, True) == (640, True)


def test_a_tier_before_the_kv_cache_is_refused(monkeypatch):
    monkeypatch.setattr(fingerprint, "_described", None)
    with pytest.raises(Refusal, match="a secondary tier is created before the KV cache") as refused:
        fingerprint.around_file_mapper(lambda: None, None, (), {})
    assert refused.value.code == "KVP412"


def promote(context, success, key="a"):
    """Ask for a promotion, on a CPU tier of two blocks."""
    manager = SimpleNamespace(primary_tier=SimpleNamespace(_num_blocks=2))
    return promotion.around_promotion(lambda *_: success, manager, (0, key, context), {})


def test_a_promotion_that_found_no_room_can_be_asked_for_again():
    context = SimpleNamespace()
    assert not promote(context, False)
    assert promote(context, True)
    assert not promote(context, True)  # once per request
    assert promote(context, True, "b")
    assert not promote(context, True, "c")  # no more than the tier holds


@pytest.mark.parametrize("late", [(True, False), (False, True), (True, True), (False, False)])
def test_one_late_tier_of_two_keeps_no_request_waiting(monkeypatch, late):
    monkeypatch.setattr(promotion, "lookup_results", lambda: ("miss", ("retry", "pending")))
    manager = SimpleNamespace(secondary_tiers=[SimpleNamespace(late=one) for one in late])

    def lookup(result):
        return promotion.around_lookup(lambda: result, manager, (), {})

    for waits in ("retry", "pending"):
        assert lookup(waits) == ("miss" if any(late) else waits)
    for known in ("hit", "miss"):
        assert lookup(known) == known


def part(name, **attributes):
    return type(name, (), attributes)()


def test_the_planner_is_found_in_a_multi_connector():
    offloading = part("OffloadingConnector", connector_scheduler="planner")
    other = part("NixlConnector", connector_scheduler="another")
    assert connectors.scheduler_of(None) is None
    assert connectors.scheduler_of(offloading) == "planner"
    assert connectors.scheduler_of(other) is None
    multi = part("MultiConnector", _connectors=[other, offloading])
    assert connectors.scheduler_of(multi) == "planner"
    assert list(connectors.parts(multi)) == [other, offloading]


@dataclass
class Pending:
    """vLLM's ``PendingPromotion``."""

    req_context: str
    keys: list[str] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)


def test_up_to_0_27_every_block_comes_up_in_a_job_of_its_own():
    waiting = {
        "disk": {"a": Pending("of a", ["x", "y"], [5, 6]), "b": Pending("of b", ["z"], [7])},
        "other": {},
    }
    manager = SimpleNamespace(_pending_load_submissions=waiting)
    flushed = []

    def flush():
        for tier, jobs in manager._pending_load_submissions.items():
            flushed.extend((tier, job) for job in jobs.values())

    legacy.split_promotions(flush, manager, (), {})
    assert flushed == [
        ("disk", Pending("of a", ["x"], [5])),
        ("disk", Pending("of a", ["y"], [6])),
        ("disk", Pending("of b", ["z"], [7])),
    ]


class Disk:
    """A disk that takes no direct I/O; what it was asked with."""

    def __init__(self, error=errno.EINVAL):
        self.error = error
        self.asked = []

    def __call__(self, paths, view, offsets, size, direct):
        self.asked.append((paths, offsets, size, direct))
        if direct:
            raise OSError(self.error, "no direct I/O here")


@pytest.fixture
def disk(monkeypatch):
    made = Disk()
    for name in ("store_blocks", "load_blocks"):
        monkeypatch.setattr(legacy, name, made)
    monkeypatch.setattr(legacy, "_buffered", set())
    return made


def test_up_to_0_26_blocks_are_stored_where_direct_io_is_not_possible(disk):
    legacy.replace_store(None)("/disk/a_r0/00/01_g0/file", memoryview(b""), 8, 4)
    legacy.replace_store(None)("/disk/a_r0/99/02_g0/other", memoryview(b""), 12, 4)
    assert disk.asked == [
        (["/disk/a_r0/00/01_g0/file"], [8], 4, True),
        (["/disk/a_r0/00/01_g0/file"], [8], 4, False),
        (["/disk/a_r0/99/02_g0/other"], [12], 4, False),
    ]


def test_what_could_not_be_read_is_not_opened_again_at_once(disk):
    """It may hang again, and who waits for the first time to end would wait for ever."""
    load = legacy.replace_load(None)
    with pytest.raises(OSError, match="no direct"):
        load("/disk/a_r0/00/01_g0/file", memoryview(b""), 0, 4)
    load("/disk/a_r0/00/01_g0/file", memoryview(b""), 0, 4)
    assert [direct for *_, direct in disk.asked] == [True, False]


@pytest.mark.parametrize("replace", [legacy.replace_store, legacy.replace_load])
def test_any_other_fault_of_a_disk_is_told(disk, replace):
    disk.error = errno.EIO
    for _ in range(2):
        with pytest.raises(OSError, match="no direct"):
            replace(None)("/disk/a_r0/00/01_g0/file", memoryview(b""), 0, 4)
    assert [direct for *_, direct in disk.asked] == [True, True]
