"""A suspension and back, in a world without vLLM: nothing is lost, and nobody runs too early."""

import pytest
from fakes import module, raising
from suspend_world import BLOCKS, MOST, PAGE, Pause, Status

from kvpatch import state
from kvpatch.patches.secondary_tiers.weights import Calls
from kvpatch.patches.suspend.server import Question
from kvpatch.patches.suspend.suspension import Cannot, Phase
from kvpatch.patches.suspend.watch import Look
from kvpatch.upstream import kvcached_api


def filled(worlds, **options):
    """An engine with two requests that run, and twelve blocks of earlier ones."""
    world = worlds(**options)
    for block in range(4, 16):
        world.pool.cache(block, f"old{block}".encode())
    world.add("first", 16, 17)
    world.add("second", 18)
    return world


@pytest.fixture
def world(worlds):
    return filled(worlds)


def begin(world, **options):
    """Ask for a suspension; a step of the engine begins it."""
    world.suspension.suspend(**({"finish": False, "whole": False, "timeout": None} | options))


def suspended(world, **options):
    begin(world, **options)
    world.until_idle()
    return world.suspension.said


def resumed(world):
    world.suspension.resume()
    world.until_idle()


def steps_of(world, count):
    for _ in range(count):
        world.step()


def until(world, phase):
    while world.suspension.phase is not phase:
        world.step()


@pytest.mark.parametrize("ahead", [0, 1])
def test_everything_is_stored_and_every_page_given_back(worlds, ahead):
    world = filled(worlds, ahead=ahead)
    said = suspended(world)
    assert said["phase"] == "suspended"
    assert (said["resident"], said["kept"], said["lost"]) == (15, 15, 0)
    assert set(world.tier.blocks) == {f"old{n}".encode() for n in range(4, 16)} | {
        b"first16",
        b"first17",
        b"second18",
    }
    world.check()
    assert world.manager.get_page_state() == {
        "inuse_pages": 1,
        "reserved_pages": 0,
        "total_pages": 1,
    }
    assert world.manager.limit == PAGE  # what kvctl and the neighbours see
    assert said["freed"] == 7 * PAGE - PAGE
    assert [request.name for request in world.scheduler.waiting] == ["first", "second"]
    assert not world.step(), "a suspended engine is stepped"


def test_batches_under_way_are_waited_for(worlds):
    """Also where nothing has to be stored, which would take a step."""
    world = worlds(ahead=2)
    world.add("first", 16)
    world.tier.blocks[b"first16"] = "bytes of first16"
    begin(world)
    assert world.suspension.phase is Phase.PAUSING
    world.step()
    assert world.suspension.phase is Phase.PAUSING
    world.until_idle()
    assert world.suspension.said["kept"] == 1


def test_stores_of_the_connector_itself_are_waited_for(world):
    """As those of a request that is aborted while everything else is stored."""
    begin(world)
    while not world.tier.flying:
        world.step()
    assert world.spill.alone
    world.tier.flying.append((world.steps + 5, b"aborted", "bytes of aborted"))
    said = suspended(world)  # the world asserts that nothing is freed under a copy
    assert said["phase"] == "suspended"
    assert b"aborted" in world.tier.blocks
    resumed(world)
    assert not world.spill.alone


def test_requests_wait_while_it_is_suspended_and_run_after_it(world):
    suspended(world)
    world.add("third")
    assert not world.step()
    resumed(world)
    assert world.suspension.phase is Phase.RUNS
    assert world.manager.limit == MOST * PAGE
    assert world.manager.total == MOST
    assert sorted(world.finished) == ["first", "second", "third"]


def test_no_request_runs_before_kvcached_has_read_the_limit(world):
    """An allocation would lower the limit again; the world asserts that none happens."""
    suspended(world)
    world.manager.reported = world.manager.limit
    world.lag = 1000
    world.suspension.resume()
    while world.steps % world.lag < 100:
        world.step()
        assert world.suspension.phase is Phase.RESUMING
        assert world.scheduler.pause_state is Pause.PAUSED_ALL
    world.lag = 1
    world.until_idle()
    assert sorted(world.finished) == ["first", "second"]


def test_a_step_says_who_was_preempted_before_anybody_runs_again(world):
    """vLLM's OffloadingConnector fails an assertion otherwise; seen under load."""
    world.fence = 0
    suspended(world)
    assert world.scheduler.reset_preempted_req_ids == set()
    resumed(world)
    assert sorted(world.finished) == ["first", "second"]


def test_pages_that_kvcached_is_mapping_ahead_are_waited_for(world):
    world.manager.mapping = 3
    assert suspended(world)["phase"] == "suspended"
    assert world.manager.total == 1
    assert world.manager.mapping == 0


def test_running_requests_may_finish_first(world):
    world.add("third")
    said = suspended(world, finish=True)
    assert world.finished == ["first", "second"]
    assert [request.name for request in world.scheduler.waiting] == ["third"]
    assert said["lost"] == 0


def test_it_is_the_same_to_suspend_twice_and_to_resume_twice(world):
    begin(world)
    world.step()
    phase = world.suspension.phase
    begin(world)
    assert world.suspension.phase is phase
    world.until_idle()
    said = suspended(world)
    assert said["kept"] == said["resident"] == 15
    for _ in range(2):
        resumed(world)
        assert world.suspension.said["phase"] == "runs"
        assert "error" not in world.suspension.said
    world.suspension.resume()
    assert world.manager.limit == MOST * PAGE


def test_what_does_not_fit_is_said_beforehand_and_afterwards(worlds):
    world = filled(worlds, room=10)
    plan = world.suspension.plan()
    assert (plan["resident"], plan["lost"], plan["running"]) == (15, 5, 2)
    said = suspended(world)
    assert (said["kept"], said["lost"]) == (10, 5)
    # The requests' own blocks and the ones used last; those that would be evicted first are lost.
    assert {f"old{n}".encode() for n in range(4, 9)}.isdisjoint(world.tier.blocks)


def test_it_can_be_left_when_not_everything_fits(worlds):
    world = filled(worlds, room=10)
    with pytest.raises(Cannot, match="no room for 5 blocks"):
        begin(world, whole=True)
    assert world.suspension.phase is Phase.RUNS
    world.until_idle()
    assert world.finished == ["first", "second"]


def test_it_is_left_when_the_tier_did_not_take_everything_in(world):
    """Blocks of the tier that are in use are no room, which only a store finds out."""
    begin(world, whole=True)
    until(world, Phase.STORING)
    world.tier.room = 10
    world.until_idle()
    assert world.suspension.said["phase"] == "runs"
    assert world.suspension.said["error"] == "its CPU tier did not take 5 blocks in"
    assert world.finished == ["first", "second"]


def test_a_suspension_that_is_given_up_waits_for_the_limit_too(world):
    """It may have begun while the engine was still resuming from another one."""
    suspended(world)
    world.lag = 1000
    world.manager.reported = world.manager.limit
    world.suspension.resume()
    begin(world)
    world.suspension.resume()
    assert world.suspension.phase is Phase.RESUMING
    assert world.scheduler.pause_state is Pause.PAUSED_ALL
    world.lag = 1
    world.until_idle()
    assert world.suspension.phase is Phase.RUNS
    assert world.manager.limit == MOST * PAGE


def test_a_tier_that_never_has_room_is_given_up(worlds, monkeypatch):
    spill = filled(worlds).spill
    spill.begin([])
    spill._missing = {b"old4": 4}
    spill.no_room(forever=False)
    assert spill.waits
    monkeypatch.setattr("kvpatch.patches.suspend.spill.PATIENCE", 3)
    spill.no_room(forever=False)
    assert spill.waits
    spill.no_room(forever=False)
    assert not spill.waits
    spill._missing = {b"old4": 4}
    spill.begin([])
    assert not spill.waits


def test_what_the_tier_has_is_not_evicted_for_what_it_has_not(worlds):
    world = filled(worlds, room=15)
    for number in range(9):
        world.tier.blocks[f"other{number}".encode()] = f"bytes of other{number}"
    for number in range(4, 10):  # the oldest of the device are the tier's oldest too
        world.tier.blocks[f"old{number}".encode()] = f"bytes of old{number}"
        world.tier.blocks.move_to_end(f"old{number}".encode(), last=False)
    said = suspended(world)
    assert (said["kept"], said["lost"]) == (15, 0)


@pytest.fixture
def now(monkeypatch):
    """The seconds of a suspension's clock, to be moved."""
    seconds = [100.0]
    monkeypatch.setattr(
        "kvpatch.patches.suspend.suspension.time.monotonic", lambda: seconds[0], raising=True
    )
    return seconds


@pytest.mark.parametrize("phase", [Phase.STORING, Phase.RELEASING])
def test_what_is_not_done_in_time_is_given_up(world, now, phase):
    """A tier that does not answer; pages that are not let go are taken back."""
    world.tier.stuck = phase is Phase.STORING
    world.fence = 0 if world.tier.stuck else 1000
    begin(world, timeout=30)
    steps_of(world, 50)
    assert world.suspension.phase is phase
    now[0] += 31
    steps_of(world, 20)
    assert world.suspension.said["phase"] == "runs"
    error = f"not suspended within 30 s, in the phase {phase.value}"
    assert error in world.suspension.said["error"]
    world.until_idle()
    assert world.finished == ["first", "second"]  # with the blocks that they had
    assert world.manager.limit == MOST * PAGE
    world.check()


@pytest.mark.parametrize("steps", range(12))
def test_resumed_at_any_step_nothing_is_lost(worlds, steps):
    world = filled(worlds, ahead=1)
    begin(world)
    steps_of(world, steps)
    resumed(world)
    assert world.suspension.phase is Phase.RUNS
    assert sorted(world.finished) == ["first", "second"]
    assert world.manager.limit == MOST * PAGE
    assert world.manager.total == MOST
    world.check()
    here = set(world.pool._cached_blocks) | set(world.tier.blocks)
    assert {f"old{n}".encode() for n in range(4, 16)} <= here


@pytest.mark.parametrize("where", ["_pausing", "_storing", "_release_all", "_releasing"])
def test_an_error_of_ours_leaves_the_engine_running(world, where, monkeypatch):
    monkeypatch.setattr(world.suspension, where, raising(ValueError("of a test")))
    said = suspended(world)
    assert said["phase"] == "runs"
    assert said["error"] == "it failed with ValueError: of a test"
    assert world.finished == ["first", "second"]
    assert world.manager.limit == MOST * PAGE


broken = raising(PermissionError("of a test"))


@pytest.mark.parametrize("phase", [Phase.STORING, Phase.RELEASING, Phase.SUSPENDED])
def test_a_limit_that_cannot_be_set_again_leaves_no_request_waiting(world, phase, monkeypatch):
    """As where the pool in /dev/shm is another user's by now: the engine neither ends nor waits."""
    begin(world)
    until(world, phase)
    monkeypatch.setattr(kvcached_api, "write_limit", broken)
    world.manager.reported = world.manager.limit
    if phase is not Phase.SUSPENDED:
        world.manager.reported = 3 * PAGE  # kvcached's thread may never read what was wished for
    world.suspension.resume()
    for _ in range(10):
        world.step()
        world.manager.reported = world.manager.limit
    assert world.suspension.phase is Phase.RUNS
    assert "of a test" in world.suspension.said["unset"]
    assert sorted(world.finished) == ["first", "second"]


@pytest.fixture
def inconsistent(monkeypatch):
    """kvcached's error after which its engine must not go on."""

    class StateConsistencyError(RuntimeError):
        pass

    module(monkeypatch, "kvcached.errors", StateConsistencyError=StateConsistencyError)
    return StateConsistencyError


def unknown(owner, name, error):
    setattr(owner, name, raising(error("an unmap could not be confirmed")))


@pytest.mark.parametrize("what", ["trim", "_resize"])
def test_an_engine_whose_mappings_are_unknown_ends(world, inconsistent, what):
    begin(world)
    unknown(world.manager, what, inconsistent)
    with pytest.raises(inconsistent, match="could not be confirmed"):
        world.until_idle()


def test_an_engine_whose_mappings_are_unknown_ends_when_it_is_resumed(world, inconsistent):
    suspended(world)
    unknown(world.manager, "_resize", inconsistent)
    question = Question({"verb": "resume"})
    with pytest.raises(inconsistent):
        question.take(world.suspension)
    assert question.taken.is_set()
    assert "could not be confirmed" in question.said["error"]


@pytest.mark.parametrize("what", ["trim", "evict_blocks", "_resize"])
def test_an_engine_whose_mappings_are_unknown_ends_while_it_gives_pages_back(
    worlds, inconsistent, what
):
    world = filled(worlds, gives=True)
    unknown(world.pool if what == "evict_blocks" else world.manager, what, inconsistent)
    with pytest.raises(inconsistent):
        if what == "trim":
            world.until_idle()
            Look(rests=True).take(world.giving)
        else:
            world.manager.limit = world.manager.reported = 2 * PAGE
            Look(rests=False).take(world.giving)
        world.until_idle()


def test_an_error_of_ours_is_given_up_though_the_limit_cannot_be_set(world, monkeypatch):
    monkeypatch.setattr(kvcached_api, "write_limit", broken)
    said = suspended(world)  # the floor is not written, and neither is what it was
    assert said["phase"] == "runs"
    assert "PermissionError" in said["error"]
    assert world.manager.limit == MOST * PAGE
    assert world.finished == ["first", "second"]


def test_a_floor_that_was_not_written_is_no_limit_to_come_back_to(world, monkeypatch):
    """Without a pool in /dev/shm the limit is what the page allocator keeps to: the floor."""
    monkeypatch.setattr(kvcached_api, "limit", lambda manager: manager.total * PAGE)
    monkeypatch.setattr(kvcached_api, "is_applied", lambda manager: True)

    def write(manager, size):
        if size == PAGE:
            raise PermissionError("of a test")

    monkeypatch.setattr(kvcached_api, "write_limit", write)
    assert suspended(world)["phase"] == "runs"
    assert world.manager.total == MOST


def test_what_became_of_a_suspension_is_kept_until_the_next_one(world):
    begin(world)
    resumed(world)
    world.suspension.limit(7 * PAGE)  # which tells something else
    assert "error" not in world.suspension.said
    assert world.suspension.given_up == "it was resumed before it was suspended"
    begin(world)
    assert world.suspension.given_up == ""


def test_the_error_of_one_suspension_is_not_the_next_ones(world, now):
    world.tier.stuck, world.lag = True, 1000
    begin(world, timeout=30)
    until(world, Phase.STORING)
    now[0] += 31
    world.manager.reported = PAGE  # so that it does not run at once
    world.step()
    assert world.suspension.phase is Phase.RESUMING
    world.tier.stuck, world.lag = False, 1
    suspended(world)
    resumed(world)
    assert "error" not in world.suspension.said


def test_the_time_counts_from_the_question(world, now):
    """It may have waited for a long step of the engine."""
    begin(world, timeout=30, asked=now[0] - 31)
    world.until_idle()
    assert "not suspended within 30 s" in world.suspension.said["error"]


@pytest.mark.parametrize("ask", [begin, lambda world: world.suspension.plan()])
def test_requests_that_stream_their_input_are_refused(world, ask):
    world.scheduler.running[0].status = Status(name="WAITING_FOR_STREAMING_REQ")
    with pytest.raises(Cannot, match="1 of its requests stream their input"):
        ask(world)


def test_vllms_own_resume_does_not_run_a_suspended_engine(world):
    suspended(world)
    world.scheduler.set_pause_state(Pause.UNPAUSED)
    assert world.scheduler.pause_state is Pause.PAUSED_ALL
    world.scheduler.set_pause_state(Pause.PAUSED_NEW)
    resumed(world)
    assert world.scheduler.pause_state is Pause.PAUSED_NEW  # as vLLM was told meanwhile
    assert world.finished == []


def test_what_an_engine_will_take_back_is_known_at_every_step(world, monkeypatch):
    """Whoever lends its memory has to count on it."""
    written = []
    write = kvcached_api.write_limit

    def and_look(manager, size):
        write(manager, size)
        written.append(world.suspension.promised())  # on another thread, in this moment

    monkeypatch.setattr(kvcached_api, "write_limit", and_look)
    begin(world)
    while world.step():
        assert world.suspension.promised() == MOST * PAGE, world.suspension.phase
    assert world.manager.limit == PAGE
    assert written == [MOST * PAGE]
    world.suspension.limit(6 * PAGE)
    assert world.manager.limit == PAGE, "it holds from its resumption on"
    assert world.suspension.promised() == 6 * PAGE
    world.manager.limit = 5 * PAGE  # kvctl
    assert world.suspension.promised() == 5 * PAGE
    world.suspension.resume()
    while world.step():
        assert world.suspension.promised() == 5 * PAGE, world.suspension.phase
    assert world.suspension.promised() == world.manager.limit == 5 * PAGE


@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize(
    "limits",
    ["kvpatch 7", "kvctl 7", "kvctl 3, kvpatch 6", "kvpatch 6, kvctl 3"],
)
@pytest.mark.parametrize("given_up", [False, True])
def test_the_last_limit_that_is_set_at_any_step_holds_whoever_set_it(
    world, steps, limits, given_up
):
    begin(world)
    steps_of(world, steps)
    for limit in limits.split(", "):
        last = int(limit[-1])
        if limit.startswith("kvpatch"):
            world.suspension.limit(last * PAGE)
        else:
            world.manager.limit = last * PAGE
    if not given_up:
        world.until_idle()
    resumed(world)
    assert world.suspension.phase is Phase.RUNS
    assert world.manager.limit == last * PAGE
    if not (given_up and last == 3):  # more is in use, which this engine does not give back
        assert world.manager.total == last
    assert sorted(world.finished) == ["first", "second"]


def test_a_tier_that_was_emptied_meanwhile_is_said(world):
    """By vLLM's /pause or a reset with the connector, which are not for the suspension."""
    assert suspended(world)["lost"] == 0
    world.tier.blocks.clear()
    begin(world, whole=True)
    assert (world.suspension.said["kept"], world.suspension.said["lost"]) == (0, 15)


@pytest.mark.parametrize(
    ("size", "why"), [(MOST * PAGE + 1, "cannot have more"), (PAGE - 1, "needs at least one")]
)
def test_a_limit_that_it_cannot_have_is_refused(world, size, why):
    with pytest.raises(Cannot, match=why):
        world.suspension.limit(size)
    assert world.manager.limit == MOST * PAGE


def test_weights_that_were_replaced_are_refused_until_a_reset(world):
    """The reset that frees the device would be of the CPU tier too: nothing would be kept."""
    calls = state.attach(world, Calls(unanswered=True))
    with pytest.raises(Cannot, match="weights were replaced"):
        begin(world)
    calls.unanswered = False
    begin(world)
    calls.unanswered = True  # while it stores
    world.until_idle()
    assert world.suspension.phase is Phase.RUNS
    assert "weights were replaced" in world.suspension.said["error"]


def test_requests_with_loaded_blocks_let_go_of_them(worlds, monkeypatch):
    from kvpatch.patches import deadlock

    world = filled(worlds)
    loaded = world.add("loaded")
    loaded.num_computed_tokens = 64
    released = []
    monkeypatch.setattr(deadlock, "release", lambda scheduler, request: released.append(request))
    suspended(world)
    assert released == [loaded]


def test_the_beginnings_of_prompts_are_stored_first(worlds, monkeypatch):
    monkeypatch.setattr("kvpatch.patches.suspend.spill.EVERYTHING", 2)
    world = worlds()
    request = world.add("one", 5, 6, 7, 8)
    request.left = 1
    world.step()  # it has finished; its last block is evicted first
    begin(world)
    while not world.tier.flying:
        world.step()
    assert [key for _, key, _ in world.tier.flying] == [b"one5", b"one6"]
    assert BLOCKS == 4
