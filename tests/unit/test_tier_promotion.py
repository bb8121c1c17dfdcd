"""Promotion from a secondary tier: what counts as promoted, and when a block is a miss."""

import errno
from types import SimpleNamespace

import pytest
from fakes import module
from test_tier_rules import Pending

from kvpatch import state
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.patches.secondary_tiers import fixes, legacy, promotion
from kvpatch.telemetry.counters import Totals


@pytest.fixture
def manager(monkeypatch):
    """A primary tier of two chunks."""
    monkeypatch.setattr(promotion, "chunks_of", lambda tier, name: tier.chunks)
    monkeypatch.setattr(promotion, "lookup_results", lambda: ("miss", ("later", "retry")))
    return SimpleNamespace(primary_tier=SimpleNamespace(chunks=2), secondary_tiers=[])


def promote(manager, key, context, succeeds=True):
    called = []

    def wrapped(*args):
        called.append(args)
        return succeeds

    result = promotion.around_promotion(wrapped, manager, (0, key, context), {})
    if called:
        return result
    assert result is False
    return "not asked"


def test_a_block_is_promoted_once_per_request(manager):
    one, other = SimpleNamespace(), SimpleNamespace()
    assert promote(manager, "a", one) is True
    assert promote(manager, "a", one) == "not asked"
    assert promote(manager, "a", other) is True


def test_a_promotion_that_failed_is_not_a_promotion(manager):
    """The block would be lost to the request, which would wait for it."""
    one = SimpleNamespace()
    assert promote(manager, "a", one, succeeds=False) is False
    assert promote(manager, "a", one) is True
    assert promote(manager, "b", one) is True


def test_no_more_blocks_than_the_primary_tier_holds(manager):
    one = SimpleNamespace()
    assert promote(manager, "a", one) is True
    assert promote(manager, "b", one) is True
    assert promote(manager, "c", one) == "not asked"


def test_the_arguments_may_be_named(manager):
    one = SimpleNamespace()
    named = {"tier_idx": 0, "key": "a", "req_context": one}
    assert promotion.around_promotion(lambda **given: given == named, manager, (), named) is True
    assert promote(manager, "a", one) == "not asked"


LATE, ON_TIME, OTHER = SimpleNamespace(late=True), SimpleNamespace(late=False), SimpleNamespace()


@pytest.mark.parametrize(
    ("tiers", "found", "told"),
    [
        ([LATE], "later", "miss"),
        ([LATE], "retry", "miss"),
        ([ON_TIME, LATE], "later", "miss"),  # one late tier is enough
        ([LATE, OTHER], "later", "miss"),
        ([ON_TIME, OTHER], "later", "later"),
        ([], "later", "later"),
        ([LATE], "hit", "hit"),
    ],
)
def test_what_a_late_tier_has_is_a_miss(manager, tiers, found, told):
    manager.secondary_tiers = tiers
    assert promotion.around_lookup(lambda *args: found, manager, ("key",), {}) == told


# Up to 0.26


@pytest.mark.parametrize("pending", [set(), {"store"}])
def test_the_last_blocks_of_a_finished_request_are_stored(monkeypatch, pending):
    class RequestState:
        def __init__(self, context, is_finished):
            self.context, self.is_finished = context, is_finished
            self.pending_primary_stores = pending

    module(monkeypatch, "vllm.v1.kv_offload.tiering.manager", RequestState=RequestState)
    known = {"other": "kept"}
    tiering, context = SimpleNamespace(_req_state=known), SimpleNamespace(req_id="a")

    def prepare(keys, req_context):
        assert known["a"].context is context
        assert known["a"].is_finished is True
        return "stored"

    assert legacy.around_prepare_store(prepare, tiering, (["k"], context), {}) == "stored"
    assert set(known) == {"other", *(["a"] if pending else [])}
    with pytest.raises(ZeroDivisionError):
        known.pop("a", None)
        legacy.around_prepare_store(lambda *args: 1 / 0, tiering, (["k"], context), {})
    assert ("a" in known) is bool(pending)


def test_a_request_that_vllm_still_knows_is_vllms(monkeypatch):
    known = {"a": "state"}
    tiering, context = SimpleNamespace(_req_state=known), SimpleNamespace(req_id="a")
    assert legacy.around_prepare_store(lambda *args: args, tiering, ("k", context), {}) == (
        "k",
        context,
    )
    assert known == {"a": "state"}


def test_up_to_0_27_blocks_of_every_tier_and_request_come_up_by_themselves():
    waiting = {
        "disk": {"a": Pending("of a", ["x"], [5]), "b": Pending("of b", ["x", "y"], [6, 7])},
        "other": {"a": Pending("of a", ["x", "z"], [8, 9])},
    }
    manager = SimpleNamespace(_pending_load_submissions=waiting)
    legacy.split_promotions(lambda: None, manager, (), {})
    assert {tier: list(jobs.values()) for tier, jobs in waiting.items()} == {
        "disk": [
            Pending("of a", ["x"], [5]),
            Pending("of b", ["x"], [6]),
            Pending("of b", ["y"], [7]),
        ],
        "other": [Pending("of a", ["x"], [8]), Pending("of a", ["z"], [9])],
    }


@pytest.fixture
def asked(monkeypatch):
    """What a disk without direct I/O was asked; the second list has what it refuses anyway."""
    calls = []
    broken = []

    def access(paths, view, offsets, size, direct):
        calls.append((paths, offsets, size, direct))
        if direct or broken:
            raise OSError(errno.EINVAL, "not possible")

    for name in ("store_blocks", "load_blocks"):
        monkeypatch.setattr(legacy, name, access)
    monkeypatch.setattr(legacy, "_buffered", set())
    return calls, broken


def test_up_to_0_26_each_folder_of_a_layout_is_tried_with_direct_io(asked):
    calls, _ = asked
    view = memoryview(b"")
    legacy.store_block("/disk/a_r0/00/01_g0/file", view, 8, 4)
    legacy.store_block("/disk/b_r0/00/01_g0/file", view, 8, 4)
    assert [direct for *_, direct in calls] == [True, False, True, False]
    legacy.load_block("/disk/b_r0/77/01_g0/other", view, 12, 4)
    assert calls[-1] == (["/disk/b_r0/77/01_g0/other"], [12], 4, False)


def test_what_is_refused_without_direct_io_too_is_not_tried_again(asked):
    calls, broken = asked
    legacy.store_block("/disk/a_r0/00/01_g0/file", memoryview(b""), 8, 4)
    calls.clear()
    broken.append("all")
    with pytest.raises(OSError, match="not possible"):
        legacy.store_block("/disk/a_r0/00/01_g0/file", memoryview(b""), 8, 4)
    assert [direct for *_, direct in calls] == [False]


# Tokens that came from a disk, up to 0.31


class Planner(SimpleNamespace):
    """OffloadingConnectorScheduler with one request, of which a part was promoted."""

    def __init__(self, promoted, groups, size="tokens_per_chunk"):
        context = SimpleNamespace()
        if promoted:
            state.of(context, promotion.Promoted).keys.update(promoted)
        status = SimpleNamespace(
            req_context=context,
            num_locally_computed_tokens=4,
            group_states=[SimpleNamespace(offload_keys=list(keys)) for keys in groups],
        )
        configs = tuple(SimpleNamespace(**{size: 4}) for _ in groups)
        super().__init__(
            config=SimpleNamespace(kv_group_configs=configs), _req_status={"one": status}
        )
        self.totals = state.attach(self, Totals())

    def load(self, tokens, preemptions=0):
        request = SimpleNamespace(request_id="one", num_preemptions=preemptions)
        done = fixes.count_disk_hits(lambda *args: "done", self, (request, None, tokens), {})
        assert (done, self.totals.fuse.off) == ("done", "")
        return self.totals.from_disk


@pytest.mark.parametrize("size", ["tokens_per_chunk", "offloaded_block_size"])
def test_tokens_of_promoted_blocks_came_from_a_disk(size):
    # Block a is on the device, and e is not loaded.
    assert Planner("acde", ["abcde"], size).load(12) == 8
    assert Planner("", ["abcde"], size).load(12) == 0
    assert Planner("abcde", ["abcde"], size).load(0) == 0


def test_a_block_that_is_loaded_in_part_counts_by_its_tokens():
    assert Planner("b", ["ab"]).load(3) == 3


@pytest.mark.parametrize("groups", [["abc", "wxy"], ["wxy", "abc"]])
def test_of_several_groups_the_one_with_most_from_the_disk_counts(groups):
    assert Planner("cxy", groups).load(8) == 8


def test_a_load_after_a_preemption_is_not_among_vllms_hits():
    assert Planner("b", ["ab"]).load(4, preemptions=1) == 0


@pytest.mark.parametrize("counts", [False, True])
def test_without_counting_or_after_a_count_that_failed_a_load_is_vllms(counts):
    planner = Planner("b", ["ab"])
    planner.totals.fuse.off = "it failed"
    if not counts:
        state.drop(planner, Totals)
    request = SimpleNamespace(request_id="one", num_preemptions=0)
    assert fixes.count_disk_hits(lambda *args: "done", planner, (request, None, 4), {}) == "done"
    assert planner.totals.from_disk == 0


def test_blocks_that_were_promoted_and_are_not_loaded_count_for_nothing():
    assert Planner("z", ["ab"]).load(4) == 0


# Promotions beside copies from before a reset, up to 0.32


def after_reset(*transfers, fenced=True, **waiting):
    """OffloadingConnectorScheduler after a reset before job 7, with copies in flight."""
    made = SimpleNamespace(_stale_job_threshold=7, manager=SimpleNamespace(**waiting))
    if fenced:
        fence = SimpleNamespace(transfers=transfers)
        state.attach(made, Fenced(fence, None, None))
    return made


def handed(planner, fails=False):
    """What a step hands to the tiers."""
    seen = []

    def build(output):
        seen.append(getattr(planner.manager, WAITING, None))
        if fails:
            raise MemoryError
        return output

    assert fixes.hold_promotions(build, planner, ("meta",), {}) == "meta"
    return seen[0]


WAITING = "_pending_load_submissions"


@pytest.mark.parametrize("transfers", [(3,), (9, 3)])
def test_promotions_wait_for_a_copy_from_before_the_reset(transfers):
    waiting = {"tier": ["a"]}
    planner = after_reset(*transfers, **{WAITING: waiting})
    assert handed(planner) == {}
    assert planner.manager._pending_load_submissions is waiting
    with pytest.raises(MemoryError):
        handed(planner, fails=True)
    assert planner.manager._pending_load_submissions is waiting


@pytest.mark.parametrize(
    ("transfers", "fenced"), [((), True), ((7,), True), ((9, 8), True), ((3,), False)]
)
def test_otherwise_the_tiers_have_them_at_once(transfers, fenced):
    waiting = {"tier": ["a"]}
    assert handed(after_reset(*transfers, fenced=fenced, **{WAITING: waiting})) is waiting


def test_without_promotions_nothing_is_held():
    none = {}
    assert handed(after_reset(3, **{WAITING: none})) is none
    planner = after_reset(3)  # without tiers
    assert handed(planner) is None
    assert not vars(planner.manager)
