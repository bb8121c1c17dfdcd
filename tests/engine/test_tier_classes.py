"""vLLM's own tier classes with kvpatch's rows over them, without an engine."""

import errno
import inspect
import itertools
import math
import os
import queue
import resource
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from harness.engines.tier_classes import (
    BLOCKS,
    LONG,
    ROW,
    Tiers,
    rows_of,
    whole_config,
)
from kvpatch import state
from kvpatch.environ import TIER_PATIENCE, TIER_SIZE
from kvpatch.logs import log
from kvpatch.patch import Transaction
from kvpatch.patches.elastic_memory import regions as geometry
from kvpatch.patches.fence.fence import Fence, Transfer
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.patches.secondary_tiers import FEATURE, fingerprint, shared_memory
from kvpatch.patches.secondary_tiers.block_files import SEAL, TEMPORARY, Ledger
from kvpatch.patches.secondary_tiers.timeout import Unanswered
from kvpatch.patches.secondary_tiers.weights import Weights
from kvpatch.refusal import Refusal
from kvpatch.supported import release_of
from kvpatch.telemetry.disk import Disk
from kvpatch.upstream.vllm_api import lookup_results
from kvpatch.versions import installed


@pytest.fixture
def rows(monkeypatch):
    """The feature's rows in force, in this process; revert one to show its fault."""
    transaction = Transaction()
    transaction.apply_all(FEATURE.at(release_of(installed("vllm")[0])))
    monkeypatch.setattr(fingerprint, "_described", "one layout")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    yield transaction
    transaction.revert_to(0)


def has(rows, name):
    """Whether this release has the row."""
    return f"secondary_tiers.{name}" in {applied.patch.id for applied in rows.applied}


def revert(rows, *names):
    """Revert the one of these rows that this release has."""
    (here,) = [name for name in names if has(rows, name)]
    assert rows.revert(f"secondary_tiers.{here}")


@pytest.fixture
def tiers(rows, tmp_path):
    made = []

    def make(folder=tmp_path / "disk", **changes):
        made.append(Tiers(folder, **changes))
        return made[-1]

    yield make
    for one in made:
        one.manager.shutdown()


@pytest.fixture
def on_disk(tiers):
    """Make a tier whose CPU tier has lost blocks that the disk has."""

    def make(*numbers, **changes):
        one = tiers(**changes)
        one.store(*numbers)
        one.forget()
        return one

    return make


def test_blocks_come_back_after_the_cpu_tier_lost_them_and_after_a_restart(tiers):
    first = tiers()
    first.store(1, 2, 3)
    first.forget()
    assert first.find(1, 2, 3, 4) == [1, 2, 3]
    assert tiers().find(1, 2, 3, 4) == [1, 2, 3]


def test_two_tiers_of_one_type(tiers, tmp_path):
    """Each has all blocks; what one has lost comes from the other."""
    both = [{"type": "fs", "root_dir": str(tmp_path / name)} for name in ("a", "b")]
    two = tiers(tiers=both)
    two.store(1, 2, 3)
    two.file(2).unlink()
    two.forget()
    assert two.find(1, 2, 3) == [1, 2, 3]


def damage(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


# What befalls the file of block 2.
BEFALLS = {
    "truncated": lambda one: os.truncate(one.file(2), ROW // 2),
    "another's": lambda one: one.file(2).write_bytes(one.file(3).read_bytes()),
    "first bit": lambda one: damage(one.file(2), 0),
    "a bit of its middle": lambda one: damage(one.file(2), ROW // 2),
    "last bit": lambda one: damage(one.file(2), ROW - 1),
    "a bit of its seal": lambda one: damage(one.file(2), ROW + 12),
}


@pytest.mark.parametrize("befalls", BEFALLS.values(), ids=BEFALLS)
def test_a_file_that_is_not_what_was_stored_is_a_miss_and_is_stored_again(on_disk, befalls):
    one = on_disk(1, 2, 3)
    befalls(one)
    assert one.find(1, 2, 3) == [1]
    assert not one.file(2).exists()
    one.store(2)
    one.forget()
    assert one.find(1, 2, 3) == [1, 2, 3]


def test_without_the_row_blocks_that_came_with_a_damaged_one_are_lost(rows, on_disk):
    """Up to 0.27, where a job is right or wrong as a whole."""
    if not has(rows, "promoted_blocks"):
        return
    revert(rows, "promoted_blocks")
    one = on_disk(1, 2, 3)
    damage(one.file(3), ROW // 2)
    assert one.find(1, 2, 3) == []


def test_a_request_that_has_finished_stores_its_last_blocks(rows, tiers):
    """As 0.26 asks it to, in the step after the tiers were told that it has finished."""
    if not has(rows, "last_blocks"):
        return
    one = tiers()
    one.store(2, ended=True)
    one.store(2, ended=True)  # is there already
    assert not one.manager._req_state
    one.forget()
    assert one.find(2) == [2]
    revert(rows, "last_blocks")
    with pytest.raises(KeyError):
        one.store(3, ended=True)


def test_without_the_checksum_a_damaged_file_is_served(rows, on_disk):
    """What vLLM does by itself, and what the tests above can tell."""
    revert(rows, "load_block", "load_blocks")
    revert(rows, "store_block", "store_blocks")
    one = on_disk(1, 2, 3)
    damage(one.file(2), ROW // 2)
    assert one.find(1, 2, 3) == [1, -1, 3]


def test_a_folder_that_was_removed_is_a_miss_and_is_made_again(on_disk, tmp_path):
    one = on_disk(1, 2, 3)
    for file in sorted((tmp_path / "disk").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (tmp_path / "disk").rmdir()
    assert one.find(1, 2, 3) == []
    one.store(1, 2, 3)
    one.forget()
    assert one.find(1, 2, 3) == [1, 2, 3]


def test_a_tier_with_a_size_keeps_the_blocks_that_were_used_last(tiers, monkeypatch):
    monkeypatch.setenv(TIER_SIZE.name, str(3 * (ROW + SEAL)))
    one = tiers()
    store_apart(one, [1, 2, 3])
    assert one.find(1) == [1]
    one.store(4)
    one.forget()
    assert one.find(2) == []
    assert one.find(1, 3, 4) == [1, 3, 4]
    one.forget()
    assert one.find(3, 4) == [3, 4]  # up to 0.27 blocks are read in any order
    (tier,) = one.manager.secondary_tiers
    assert tier.disk.moved_bytes["evicted"] == ROW + SEAL
    # Another engine of the folder, with another size; then a file goes between a look and a load.
    monkeypatch.setenv(TIER_SIZE.name, str(2 * (ROW + SEAL)))
    other = tiers()
    (tier,) = other.manager.secondary_tiers
    tier.folder.adopting.join()
    assert other.find(3, 4) == [3, 4]
    look = tier._lookup_manager.batch_lookup

    def looked(keys, context):
        found = look(keys, context)
        other.file(3).unlink()
        return found

    other.forget()
    tier._lookup_manager.batch_lookup = looked
    assert other.find(3) == []
    assert tier.disk.errors["gone"] == 1
    assert not tier.disk.errors["load"]


def test_a_size_of_less_than_a_block_file_is_refused(tiers, monkeypatch):
    monkeypatch.setenv(TIER_SIZE.name, str(ROW + SEAL - 1))
    with pytest.raises(
        Refusal, match=r"none would be kept; set KVPATCH_TIER_SIZE to .* \[KVP385\]"
    ):
        tiers()


def test_a_ledger_that_others_can_write_to_is_refused(tiers, tmp_path, monkeypatch):
    monkeypatch.setenv(TIER_SIZE.name, "1GiB")
    (tmp_path / "disk" / f"kvpatch-{os.geteuid()}").mkdir(parents=True)
    (tmp_path / "disk" / f"kvpatch-{os.geteuid()}").chmod(0o777)
    with pytest.raises(Refusal, match=r"open to other users.*\[KVP334\]"):
        tiers()


@pytest.fixture
def full_disk():
    """Make every file end after half a block, as on a disk without room; or not any more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(full):
        limit = (ROW // 2, before[1]) if full else before
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    yield fill
    fill(False)


def test_a_full_disk_loses_blocks_and_nothing_else(tiers, tmp_path, full_disk):
    one = tiers()
    one.store(1)
    full_disk(True)
    one.store(2, 3)
    assert one.find(1, 2, 3) == [1, 2, 3]  # from the CPU tier
    full_disk(False)
    assert {file.name for file in (tmp_path / "disk").rglob("*.*") if file.is_file()} == {
        "config.json",
        one.file(1).name,
    }
    one.forget()
    assert one.find(1, 2, 3) == [1]
    one.store(2, 3)
    one.forget()
    assert one.find(1, 2, 3) == [1, 2, 3]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setenv(TIER_PATIENCE.name, "0.2")


def test_a_disk_that_hangs_while_reading_is_passed_over_until_it_answers(rows, impatient, on_disk):
    one = on_disk(1, 2, 3, 5)
    data = one.file(2).read_bytes()
    one.file(2).unlink()
    os.mkfifo(one.file(2))  # whoever opens it waits for a writer
    # Up to 0.27 a block that comes up in the same step is not held by it.
    assert one.find(1, 2, 3) == ([1] if has(rows, "promoted_blocks") else [])
    assert one.tier.late
    # Others do not wait any more, and what they store does not stay pinned.
    assert one.find(5) == []
    one.store(4)
    assert not one.file(4).exists()
    assert one.find(4) == [4]
    with one.file(2).open("wb"):
        one.file(2).unlink()
    one.tier.drain_jobs()  # what it has read is nothing, and it removes the file
    one.file(2).write_bytes(data)
    one.step()
    assert not one.tier.late
    one.forget()
    assert one.find(1, 2, 3) == [1, 2, 3]


def test_without_the_rows_a_disk_that_hangs_stalls_the_request(rows, impatient, on_disk):
    revert(rows, "lookup")
    one = on_disk(1, 2, 3)
    one.file(2).unlink()
    os.mkfifo(one.file(2))
    assert one.find(1, 2, 3, within=3) is None
    with one.file(2).open("wb"):
        pass


@pytest.fixture
def hung_probe(monkeypatch):
    """Every question which files there are waits for the event."""
    from vllm.v1.kv_offload.tiering.fs.manager import FsAsyncLookupManager

    answers = threading.Event()
    batch_lookup = FsAsyncLookupManager.batch_lookup

    def waiting(self, keys, context):
        answers.wait()
        return batch_lookup(self, keys, context)

    monkeypatch.setattr(FsAsyncLookupManager, "batch_lookup", waiting)
    yield answers
    answers.set()


def test_a_disk_that_hangs_when_asked_for_files_is_passed_over(impatient, on_disk, hung_probe):
    one = on_disk(1)
    assert one.find(1) == []
    assert one.tier.late
    one.manager.shutdown()  # does not wait for the disk either
    hung_probe.set()


@pytest.mark.parametrize("ours", [True, False], ids=["with", "without"])
def test_two_answers_about_one_block_do_not_end_the_engine(rows, tiers, hung_probe, ours):
    """A request is aborted while the disk is asked, and another asks for the same block.

    From 0.30 on vLLM lets the second share the question of the first. Up to 0.27 it goes by
    the second answer.
    """
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager, LookupState

    shared = hasattr(LookupState, "generation")
    ends = not ours and not shared and hasattr(AsyncLookupManager, "mark_miss")
    if not ours:
        revert(rows, "tier_class", "tier_class_itself")
    one = tiers()
    first = one.request()
    for context in (first, one.request()):
        assert one.manager.lookup(one.key(1), context) in lookup_results()[1]
        one.step()
        if context is first:
            one.manager.on_request_finished(context)
    hung_probe.set()
    end = time.monotonic() + LONG
    answered = one.tier._lookup_manager._pending_results
    while answered.qsize() < (1 if shared else 2) and time.monotonic() < end:
        pass
    if not ends:
        assert one.manager.lookup(one.key(1), context) is lookup_results()[0]
    else:
        with pytest.raises(AssertionError, match="second lookup result"):
            one.manager.lookup(one.key(1), context)


PROMPT = range(1, 2 * BLOCKS + 1)


def store_apart(one, numbers):
    for number in numbers:
        one.store(number)
    one.forget()


def test_a_prompt_larger_than_the_cpu_tier_gets_what_fits(tiers):
    one = tiers()
    store_apart(one, PROMPT)
    assert one.find(*PROMPT) == list(range(1, BLOCKS + 1))


def test_without_the_row_a_prompt_larger_than_the_cpu_tier_gets_nothing(rows, tiers):
    """Its last blocks push its first ones out again, in turn for as long as it waits."""
    revert(rows, "promotion", "promotion_of_tier")
    one = tiers()
    store_apart(one, PROMPT)
    assert not one.find(*PROMPT, within=3)


class Copying:
    """A CPU tier of one chunk, and vLLM's planner, which has passed a store of it to a worker."""

    def __init__(self, one):
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
        from vllm.v1.core.sched.output import SchedulerOutput

        planned = scheduler.OffloadingConnectorScheduler
        if "vllm_config" in inspect.signature(planned).parameters:  # vLLM 0.26
            self.planner = planned(one.spec, *whole_config({}, {}))
        else:
            self.planner = planned(one.spec)
        assert self.planner.manager is one.manager
        self.one = one
        one.step = lambda: self.planner.build_connector_meta(SchedulerOutput.make_empty())
        fence = Fence(lambda page: (page, page + 1), workers=2)
        pages = SimpleNamespace(capture_physical_release_marker=lambda: 0)
        self.fence = state.attach(self.planner, Fenced(fence, pages, None)).fence

    def store(self, number):
        """Plan a store of a block; what the worker's copy writes when it ends."""
        stored = self.one.manager.prepare_store([self.one.key(number)], self.one.request())
        (chunk,) = rows_of(stored.store_spec)
        self.job = self.planner._generate_job_id()
        self.fence.plan([(self.job, Transfer("a request", (number,)))], 0)

        def copy():
            np.asarray(self.one.primary.get_kv_memoryview())[int(chunk)] = number

        return copy


def test_after_a_reset_nothing_is_promoted_before_older_copies_have_ended(rows, on_disk):
    if not has(rows, "reset"):
        return  # vLLM 0.33 waits by itself
    one = on_disk(1, blocks=1)
    old = Copying(one)
    copy = old.store(2)
    old.planner.reset_cache()
    assert one.find(1, within=0.5) is None
    old.fence.report(old.job, 1)  # by one of two workers
    assert one.find(1, within=0.1) is None
    copy()
    old.fence.report(old.job, 1)
    assert one.find(1) == [1]
    # A copy of after the reset holds nothing up.
    one.forget()
    old.fence.plan([(old.planner._generate_job_id(), Transfer("another", (3,)))], 0)
    assert one.find(1) == [1]


def test_without_the_row_an_older_copy_overwrites_what_was_promoted(rows, on_disk):
    """Up to 0.32: the block is found, and has another's KV."""
    if not has(rows, "reset"):
        return
    revert(rows, "reset")
    one = on_disk(1, blocks=1)
    old = Copying(one)
    copy = old.store(2)
    old.planner.reset_cache()
    assert one.find(1) == [1]
    copy()
    assert one.find(1) == [2]


def test_requests_together_larger_than_the_cpu_tier_all_get_on(tiers):
    """Each takes what it can get while the others push its blocks out."""
    one = tiers()
    prompts = [range(first, first + BLOCKS // 2) for first in range(1, 33, BLOCKS // 2)]
    for prompt in prompts:
        one.store(*prompt)
    one.forget()
    waiting = [(one.request(), prompt) for prompt in prompts]
    end = time.monotonic() + LONG
    while waiting and time.monotonic() < end:
        waiting = [
            (context, prompt)
            for context, prompt in waiting
            if one.answered(context, prompt) is None
        ]
        one.step()
    assert not waiting


def test_files_and_folders_are_private(tiers, tmp_path):
    before = os.umask(0)
    try:
        one = tiers()
        one.store(1)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "disk").rglob("*") if path.name != "config.json"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o700, 0o600}
    assert one.file(1) in files


@dataclass
class Job:
    """A job of one block for a tier, under the names of all releases."""

    job_id: int
    keys: list[Any]
    req_context: Any
    is_promotion: bool = True
    submit_time: float = 0.0
    chunk_ids: tuple[int, ...] = (0,)
    block_ids: tuple[int, ...] = (0,)


def make_late(one):
    """Let the disk owe an answer for ever."""
    one.tier.unanswered.clock = lambda: 0.0
    one.tier.unanswered.asked("hung")
    one.tier.unanswered.clock = lambda: 1e9
    assert one.tier.late


def suspend(one):
    """Let the caches hold blocks of other weights."""
    one.tier.weights = Weights(lambda: "", "", suspended=True)


@pytest.mark.parametrize(("pass_over", "errors"), [(make_late, {"late": 2}), (suspend, {})])
def test_a_tier_that_is_passed_over_declines_what_it_is_handed(on_disk, pass_over, errors):
    """A block that was found, and whose tier is late before it is asked for the bytes.

    That is an error of a late disk, and none where the weights are others.
    """
    one = on_disk(1)
    pass_over(one)
    before = bytes(one.primary.get_kv_memoryview().cast("B"))
    one.tier.submit_load(Job(71, [one.key(1)], one.request()))
    one.tier.submit_store(Job(72, [one.key(2)], one.request(), is_promotion=False))
    # No thread is asked, and none of the blocks stays pinned.
    declined = [(result.job_id, result.success) for result in one.tier.get_finished_jobs()]
    assert declined == [(71, False), (72, False)]
    assert one.tier.disk.errors == errors
    assert one.tier.get_finished_jobs() == []
    one.tier.drain_jobs()
    assert one.tier.get_finished_jobs() == []
    assert bytes(one.primary.get_kv_memoryview().cast("B")) == before
    assert not one.file(2).exists()


@pytest.mark.parametrize("pass_over", [make_late, suspend])
def test_a_tier_that_is_passed_over_has_nothing_that_it_had_before(on_disk, pass_over):
    one = on_disk(1)
    context = one.request()
    end = time.monotonic() + LONG
    nowhere, later = lookup_results()
    while (found := one.tier.lookup(one.key(1), context)) in later and time.monotonic() < end:
        one.step()
    assert found not in (nowhere, *later)
    pass_over(one)
    assert one.tier.lookup(one.key(1), context) is nowhere


def test_what_waits_in_the_queue_makes_no_tier_late():
    from kvpatch.patches.secondary_tiers.fs import TimedTasks

    now, started = [0.0], []
    unanswered = Unanswered(10, lambda: now[0])

    class Pool:
        """Runs nothing by itself."""

        def __init__(self):
            self.tasks = []
            self.other = "its own"

        def enqueue_load(self, job_id, n_tasks, tasks):
            assert n_tasks == len(tasks)
            self.tasks += tasks

        enqueue_store = enqueue_load

    def task():
        now[0] += 11
        started.append(unanswered.late)

    pool = Pool()
    timed = TimedTasks(pool, unanswered, Disk(), Ledger())
    timed.enqueue_load(1, 2, [task, task])
    timed.enqueue_store(2, 1, [task])
    assert timed.other == "its own"
    now[0] = 100
    assert not unanswered.late
    for queued in pool.tasks:
        queued()
        assert not unanswered.late
    assert started == [True] * 3


def test_a_slow_disk_that_answers_lookups_is_not_late(on_disk, monkeypatch):
    from vllm.v1.kv_offload.tiering.fs.manager import FsAsyncLookupManager

    one, now, late = on_disk(1, 300), [0.0], []
    unanswered = one.tier._lookup_manager._unanswered = Unanswered(10, lambda: now[0])
    batch_lookup = FsAsyncLookupManager.batch_lookup

    def slow(self, keys, context):
        now[0] += 0.05 * len(keys)
        late.append(unanswered.late)
        return batch_lookup(self, keys, context)

    monkeypatch.setattr(FsAsyncLookupManager, "batch_lookup", slow)
    numbers = range(1, 302)
    found = one.tier._lookup_manager.batch_lookup([one.key(n) for n in numbers], one.request())
    assert [number for number, there in zip(numbers, found, strict=True) if there] == [1, 300]
    assert late == [False] * 3
    now[0] += 11
    assert not unanswered.late


def test_what_a_disk_took_and_gave_is_counted(on_disk):
    one = on_disk(1, 2, 3)
    one.store(3)  # which has a file
    one.forget()
    assert one.find(1, 2) == [1, 2]
    assert one.tier.disk.moved_bytes == {"stored": 3 * ROW, "loaded": 2 * ROW}
    assert one.tier.disk.errors == {}


def test_errors_of_a_disk_are_counted_by_kind(on_disk, tmp_path, monkeypatch):
    one = on_disk(1, 2)
    damage(one.file(2), ROW // 2)
    assert one.find(1, 2) == [1]
    assert one.tier.disk.errors == {"damaged": 1}
    one.forget()
    shut = Path(one.tier.file_mapper.base_path + "_r0") / TEMPORARY
    for leftover in shut.iterdir():
        leftover.unlink()
    shut.rmdir()
    shut.touch()  # in the place of a folder, which no user can write to
    one.store(3)
    assert one.tier.disk.errors == {"damaged": 1, "store": 1}
    one.file(1).unlink()
    one.file(1).mkdir()
    one.forget()
    assert one.find(1) == []
    assert one.tier.disk.errors == {"damaged": 1, "store": 1, "load": 1}


def test_a_store_that_a_full_disk_had_no_room_for_is_counted_as_such(on_disk, monkeypatch):
    one = on_disk(1)

    def full(*_):
        raise OSError(errno.ENOSPC, "simulated")

    monkeypatch.setattr(os, "replace", full)
    one.store(2)
    assert one.tier.disk.errors == {"full": 1}


def test_a_look_for_files_that_fails_is_counted(on_disk, monkeypatch):
    one = on_disk(1)

    def fail(key):
        raise OSError(errno.EIO, "simulated")

    monkeypatch.setattr(one.tier.file_mapper, "get_file_name", fail, raising=False)
    assert one.find(1) == []
    assert one.tier.disk.errors["lookup"] >= 1


def test_the_tiers_of_an_engine_are_described(tiers, tmp_path):
    from kvpatch.patches.metrics import tiers as described

    both = [{"type": "fs", "root_dir": str(tmp_path / name)} for name in ("a", "b")]
    one = tiers(tiers=both)
    one.store(1, 2, 3)
    connector = type("OffloadingConnector", (), {})()
    connector.connector_scheduler = SimpleNamespace(manager=one.manager)
    transfer = SimpleNamespace(
        kv_connector="OffloadingConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config={"cpu_bytes_to_use": BLOCKS * ROW},
    )
    core = SimpleNamespace(
        scheduler=SimpleNamespace(connector=connector),
        vllm_config=SimpleNamespace(
            kv_transfer_config=transfer, parallel_config=SimpleNamespace(world_size=1)
        ),
    )
    names = {"connector": "OffloadingConnector", "tier": "cpu"}
    assert described.first(core) == {"used_blocks": 3, "total_blocks": BLOCKS}
    bytes_of = {"used_bytes": 3 * ROW, "total_bytes": BLOCKS * ROW}
    assert described.cpu(core) == [names | bytes_of]
    assert [disk["tier"] for disk in described.disks(core)] == ["fs", "fs"]
    for disk in described.disks(core):
        assert disk["connector"] == "OffloadingConnector"
        assert disk["bytes"] == {"stored": 3 * ROW, "loaded": 0, "evicted": 0}
        assert not any(disk["errors"].values())


def test_the_first_of_two_answers_stays():
    """Up to 0.29; the second is of a disk that has changed meanwhile."""
    from kvpatch.patches.secondary_tiers.fs import FirstAnswers

    lookups = object.__new__(FirstAnswers)
    lookups._lookup_state = {"a": SimpleNamespace(result=None)}
    lookups._pending_results = queue.SimpleQueue()
    for answer in (True, False):
        lookups._pending_results.put([("a", answer), ("of nobody", answer)])
    lookups.drain_results()
    assert lookups._lookup_state["a"].result is True


def test_hashes_by_a_random_seed_are_told(caplog, monkeypatch):
    from vllm.v1.core import kv_cache_utils

    from kvpatch.patches.secondary_tiers import fs

    log.addHandler(caplog.handler)
    try:
        monkeypatch.setattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", "fixed", raising=False)
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        fs._warn_of_random_hashes()
        monkeypatch.delattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        fs._warn_of_random_hashes()
        assert caplog.text == ""
        monkeypatch.delenv("PYTHONHASHSEED")
        fs._warn_of_random_hashes()
    finally:
        log.removeHandler(caplog.handler)
    assert "PYTHONHASHSEED is not set" in caplog.text


def test_a_folder_that_others_can_open_is_refused(tiers):
    folder = Path(f"{folder_of(tiers)}_r0")
    folder.chmod(0o777)
    with pytest.raises(Refusal, match=r"is open to other users.*KVP334"):
        tiers()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777


def test_two_users_of_one_folder_have_folders_of_their_own(tiers, monkeypatch):
    first = folder_of(tiers)
    # What follows is of a user we are not.
    monkeypatch.setattr(fingerprint, "own_folder", lambda path: None)
    assert folder_of(tiers) == first
    monkeypatch.setattr(shared_memory, "_check", lambda path, status: None)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert folder_of(tiers) != first


def test_what_a_killed_engine_was_writing_is_swept_at_the_next_start(tiers):
    folder = Path(f"{folder_of(tiers)}_r0") / TEMPORARY
    folder.mkdir(exist_ok=True)
    (folder / "old").touch()
    os.utime(folder / "old", (0, 0))
    tiers()
    assert list(folder.iterdir()) == []


CALLS = ("open", "writev", "readv", "close", "fstat", "rename", "replace", "unlink", "mkdir")


def test_every_call_to_the_disk_fails_in_turn(tiers, tmp_path, monkeypatch):
    """No error leaves the tier, a fault is a miss, and what comes back is right."""
    calls = itertools.count(1)
    failing = 0

    def counted(call):
        def run(*args, **kwargs):
            if threading.current_thread().name.startswith("vllm_kv_py_fs") and (
                next(calls) == failing
            ):
                raise OSError(errno.EIO, "the disk failed", str(args[0]))
            return call(*args, **kwargs)

        return run

    for name in CALLS:
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    number, last = 0, 1
    lost = 0
    while number <= last:
        failing, calls = number, itertools.count(1)
        one = tiers(tmp_path / str(number))
        one.store(1, 2, 3)
        one.forget()
        found = one.find(1, 2, 3)
        assert found == [1, 2, 3][: len(found or [])]
        lost += found != [1, 2, 3]
        last = max(last, next(calls) - 1) if not number else last
        number += 1
    assert last > 20
    assert lost > 10


def folder_of(make, **changes):
    return str(make(**changes).tier.file_mapper.base_path)


DIFFERENT = {
    "model": {"model__name": "another/model"},
    "dtype": {"model__dtype": "bfloat16"},
    "block size": {"tokens_per_block": 64},
    "ranks": {"parallel__tp_size": 2, "parallel__world_size": 2},
    "layout or weights": {"described": "another layout"},
}


@pytest.mark.parametrize("changes", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_engines_that_differ_have_folders_of_their_own(tiers, changes, monkeypatch):
    first = folder_of(tiers)
    assert folder_of(tiers) == first
    monkeypatch.setattr(fingerprint, "_described", changes.get("described", "one layout"))
    assert folder_of(tiers, **changes) != first


def test_without_the_row_layouts_and_numbers_of_ranks_share_a_folder(rows, tiers, monkeypatch):
    ours = folder_of(tiers)
    revert(rows, "file_mapper")
    plain = folder_of(tiers)
    assert plain != ours
    assert folder_of(tiers, **DIFFERENT["ranks"]) == plain
    monkeypatch.setattr(fingerprint, "_described", "another layout")
    assert folder_of(tiers) == plain


def test_vllms_example_tier_gives_back_what_lies_in_the_cpu_tier(tiers):
    """Why it is refused: it keeps names and no bytes."""
    one = tiers(tiers=[{"type": "example"}])
    one.store(1)
    one.store(*range(2, 2 + BLOCKS))  # takes the place of block 1
    assert one.find(1) not in ([1], [], None)


def layout(order, blocks=5, sizes=(2, 4, 3, 8)):
    """Describe two layers' caches as kvcached lays them out: [blocks, K/V, tokens, heads, size]."""
    of_layer = math.prod(sizes)
    if order == "non-contiguous":
        pools = [torch.zeros(blocks, of_layer) for _ in range(2)]
        parts = pools
    else:
        pools = [torch.zeros(blocks, 2 * of_layer)] * 2
        parts = pools[0].split(of_layer, dim=1)
    caches = {}
    for name, pool, part in zip("ab", pools, parts, strict=True):
        buffers, tokens, heads, size = sizes
        if order == "heads first":
            caches[name] = part.unflatten(1, (buffers, heads, tokens, size)).transpose(2, 3)
        else:
            caches[name] = part.unflatten(1, sizes)
        caches[name]._kvcached_block_copy_view = pool.view(torch.uint8)
    groups = [["a", "b"]]
    regions = geometry.find_regions(caches, groups, blocks).tensors
    rows = [(region.data_ptr(), int(region.shape[1])) for region in regions]
    return fingerprint.block_layout(caches, groups, rows)


def test_every_order_of_the_bytes_of_a_block_is_described_differently():
    orders = ["contiguous", "non-contiguous", "heads first"]
    described = [layout(order) for order in orders]
    assert len({repr(one) for one in described}) == 3
    # How many blocks an engine has changes nothing about a block.
    assert [layout(order, blocks=9) for order in orders] == described
    assert layout("contiguous", sizes=(2, 4, 6, 4)) != layout("contiguous")


def test_a_second_engine_with_the_same_engine_id_is_refused():
    from kvpatch.patches.secondary_tiers.shared_memory import around_engine_core

    transfer = SimpleNamespace(
        kv_connector="OffloadingConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config={},
        engine_id=f"kvpatch-test-{os.getpid()}",
    )
    wanted = SimpleNamespace(kv_transfer_config=transfer)

    class EngineCore:
        pass

    def start():
        return around_engine_core(lambda config: "started", EngineCore(), (wanted,), {})

    assert start() == "started"  # and is gone again, with its claim
    file = Path(f"/dev/shm/vllm_offload_{transfer.engine_id}.mmap")
    file.touch(0o600)
    try:
        with pytest.raises(RuntimeError) as refused:
            start()
    finally:
        file.unlink()
    assert str(refused.value) == (
        f"kvpatch refuses to start vLLM: the CPU tier's shared memory {file} already exists, "
        f"because another engine with engine_id {transfer.engine_id} is running or was killed, and "
        "two engines that share this memory would load each other's blocks; give each engine its "
        "own engine_id in kv_transfer_config, or remove the file when no engine uses it. [KVP413]"
    )
