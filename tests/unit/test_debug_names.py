"""Restored blocks, compared with what was stored under their hashes (``kvpatch verify``)."""

import pickle
from types import SimpleNamespace

import pytest
from test_debug import Chunks, Row, Worker, step

from kvpatch import state
from kvpatch.environ import VERIFY
from kvpatch.patches.debug import checksums, journal, names
from kvpatch.patches.debug.audit import Violation


class Manager:
    """A CPU tier that gives chunks away in turn; ``mistake`` looks one up for another key."""

    def __init__(self, chunks=3):
        self.chunks = chunks
        self.at = {}
        self.mistake = {}

    def prepare_store(self, keys, context):
        new = [key for key in keys if key not in self.at]
        for key in new:
            chunk = len(self.at) % self.chunks
            self.at = {other: at for other, at in self.at.items() if at != chunk} | {key: chunk}
        spec = SimpleNamespace(block_ids=[self.at[key] for key in new])
        return SimpleNamespace(keys_to_store=new, store_spec=spec)

    def prepare_load(self, keys, context):
        found = [self.at[self.mistake.get(key, key)] for key in keys]
        return SimpleNamespace(block_ids=found)


class Engine:
    """A scheduler with a manager, and a worker, of a run of ``kvpatch verify``."""

    def __init__(self, release, folder):
        self.folder = folder
        self.manager = Manager()
        self.worker = Worker(release)
        self.build(lambda: step())

    def build(self, plan):
        """Build a step, and run it in the worker's process."""
        planner = SimpleNamespace(manager=self.manager)
        made = checksums.around_build(lambda output: plan(), planner, (object(),), {})
        state.attach(made, pickle.loads(pickle.dumps(state.find(made, names.Names))))
        self.worker.call("start_kv_transfers", made)
        self.worker.call("prepare_store_kv", made)

    def store(self, job, key, block):
        def plan():
            chunks = Chunks(*self.manager.prepare_store([key], None).store_spec.block_ids)
            return step(stores={job: (self.worker.blocks(block), chunks)})

        self.build(plan)
        self.build(lambda: step())  # which launches it
        self.worker.worker.get_finished()

    def load(self, job, key, block):
        chunks = Chunks(*self.manager.prepare_load([key], None).block_ids)
        self.build(lambda: step(loads={job: (chunks, self.worker.blocks(block))}))
        self.worker.worker.get_finished()


@pytest.fixture(params=["0.25.1", "0.28.0", "0.33.0"])
def engine(request, tmp_path, monkeypatch):
    monkeypatch.setenv(VERIFY.name, str(tmp_path))
    return Engine(request.param, tmp_path)


def test_a_block_that_comes_back_under_its_hash_is_right(engine):
    engine.store(1, b"a", 2)
    engine.store(2, b"b", 3)
    engine.load(3, b"a", 6)
    (counts,) = journal.read(engine.folder)
    assert counts == {"stored": 2, "loaded": 1, "unverified": 0, "named": 1}


def test_a_chunk_that_is_looked_up_for_another_block_is_found(engine):
    engine.store(1, b"a", 2)
    engine.store(2, b"b", 3)
    engine.manager.mistake = {b"a": b"b"}
    with pytest.raises(Violation, match="stored under its hash: block 6"):
        engine.load(3, b"a", 6)


def test_a_block_that_was_computed_twice_may_have_been_rounded_differently(engine):
    engine.store(1, b"a", 2)
    for number, key in enumerate((b"b", b"c", b"d")):  # evict it
        engine.store(2 + number, key, 3)
    del engine.manager.at[b"d"]
    engine.worker.device[2] = Row([7] * 4)
    engine.store(9, b"a", 2)
    engine.load(10, b"a", 6)
    assert engine.worker.worker.checked["named"] == 1


def test_what_was_stored_by_nobody_here_has_no_bytes_to_compare(engine):
    engine.manager.at[b"x"] = 0
    engine.worker.worker.forget([0])
    engine.worker.copies.tier[0] = Row([5] * 4)
    engine.load(1, b"x", 6)
    assert engine.worker.worker.checked == {"stored": 0, "loaded": 0, "unverified": 1, "named": 0}


def test_debug_mode_by_itself_has_no_names(monkeypatch):
    monkeypatch.delenv(VERIFY.name, raising=False)
    worker = Worker("0.32.0")
    assert type(worker.worker) is checksums.AuditedWorker
    assert worker.worker.checked == {"stored": 0, "loaded": 0, "unverified": 0}
