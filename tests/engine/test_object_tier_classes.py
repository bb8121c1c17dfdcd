"""vLLM's object store tier with kvpatch's rows over it, on a store and a NIXL of this process."""

import ctypes
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_tier_classes import rows  # noqa: F401

from harness.engines.tier_classes import LONG, ROW, Tiers
from kvpatch.environ import TIER_PATIENCE
from kvpatch.patches.secondary_tiers import fingerprint
from kvpatch.patches.secondary_tiers.weights import Weights

objects = pytest.importorskip("vllm.v1.kv_offload.tiering.obj.manager")

CONFIG = {"bucket": "blocks", "endpoint_override": "http://store"}
TIER = {"type": "obj", "store_config": CONFIG}
SUFFIX = ".seal"


class Store:
    """Objects by name, and what befalls those that ask for them.

    Attributes:
        objects: bytes by name.
        answers: whether a transfer that has begun comes to an end.
        fails: whether a transfer of these names fails.
        refuses: whether a call that submits these names returns nothing or ``ERR``, or raises.
    """

    def __init__(self):
        self.objects = {}
        self.answers = True
        self.fails = lambda way, names: False
        self.refuses = lambda call, names: False
        self.moved = []
        self.registered = 0

    def agent(self, name, config):
        return Agent(self)


class Agent:
    """What the tier calls of NIXL: prepared lists are of (address, bytes) and of (name, bytes)."""

    def __init__(self, store):
        self.store = store

    def create_backend(self, name, parameters):
        assert (name, parameters["bucket"]) == ("OBJ", "blocks")

    def query_memory(self, asked, memory, backend):
        return [{} if name in self.store.objects else None for *_, name in asked]

    def register_memory(self, places, memory):
        named = [name for *_, name in places]
        if self.store.refuses("raise", named):
            raise RuntimeError("NIXL_ERR_BACKEND")
        if self.store.refuses("register", named):
            return None
        self.store.registered += 1
        return SimpleNamespace(trim=lambda: [(name, size) for _, size, _, name in places])

    def deregister_memory(self, registered):
        self.store.registered -= 1

    def prep_xfer_dlist(self, agent, places, memory=""):
        if agent == "ObjAgent" and self.store.refuses("prepare", [name for name, _ in places]):
            return None
        return [one[:2] for one in places]

    def release_dlist_handle(self, prepared):
        assert prepared

    def make_prepped_xfer(self, way, local, at, remote, all_of):
        if self.store.refuses("make", [name for name, _ in remote]):
            return None
        return way, [local[place] for place in at], [remote[place] for place in all_of]

    def transfer(self, handle):
        _, _, named = handle
        return "ERR" if self.store.refuses("transfer", [name for name, _ in named]) else "PROC"

    def check_xfer_state(self, handle):
        way, places, named = handle
        names = [name for name, _ in named]
        if not self.store.answers:
            return "PROC"
        if self.store.fails(way, names):
            raise RuntimeError("NIXL_ERR_BACKEND")
        for (address, size), (name, length) in zip(places, named, strict=True):
            assert size == length
            if way == "WRITE":
                self.store.objects[name] = ctypes.string_at(address, size)
                continue
            if name not in self.store.objects:
                raise RuntimeError("NIXL_ERR_BACKEND")
            ctypes.memmove(address, self.store.objects[name], size)
        self.store.moved.append((way, names))
        return "DONE"

    def release_xfer_handle(self, handle):
        pass

    def get_xfer_telemetry(self, handle):
        return SimpleNamespace(xferDuration=1)


@pytest.fixture
def store(monkeypatch):
    one = Store()
    monkeypatch.setattr(objects, "nixl_agent", one.agent)
    monkeypatch.setattr(objects, "nixl_agent_config", lambda **options: None)
    return one


@pytest.fixture
def tiers(rows, store, tmp_path):  # noqa: F811
    made = []

    def start(**changes):
        made.append(Tiers(tmp_path, **{"tiers": [TIER]} | changes))
        return made[-1]

    yield start
    for one in made:
        for tier in one.manager.secondary_tiers:
            tier.shutdown()
    assert store.registered == 0


def names(store, suffix):
    return [name for name in store.objects if name.endswith(suffix)]


def test_blocks_come_back_from_a_store_that_another_engine_filled(tiers, store):
    tiers().store(1, 2, 3)
    assert len(names(store, ".bin")) == len(names(store, SUFFIX)) == 3
    other = tiers()
    assert other.find(1, 2, 3, 4) == [1, 2, 3]
    assert other.tier.disk.moved_bytes == {"loaded": 3 * ROW}
    assert not other.tier.disk.errors


def test_a_seal_is_written_once_its_block_is(tiers, store):
    """A block of an engine that was killed before is not there."""
    tiers().store(1, 2)
    assert [(way, {Path(name).suffix for name in moved}) for way, moved in store.moved] == [
        ("WRITE", {".bin"}),
        ("WRITE", {SUFFIX}),
    ]
    del store.objects[names(store, SUFFIX)[0]]
    assert tiers().find(1) == []


@pytest.mark.parametrize("kind", [".bin", SUFFIX])
def test_an_object_that_is_not_what_was_stored_is_a_miss(tiers, store, kind):
    tiers().store(1, 2)
    (damaged, _) = names(store, kind)
    store.objects[damaged] = bytes(1 ^ store.objects[damaged][0]) + store.objects[damaged][1:]
    one = tiers()
    found = one.find(1, 2)
    assert found in ([], [1])
    assert one.tier.disk.errors == {"damaged": 1}


def test_a_block_in_the_place_of_another_is_a_miss(tiers, store):
    tiers().store(1, 2)
    for suffix in (".bin", SUFFIX):
        first, second = names(store, suffix)
        store.objects[second] = store.objects[first]
    one = tiers()
    assert one.find(2) == []
    assert one.tier.disk.errors == {"damaged": 1}


@pytest.mark.parametrize(("way", "errors"), [("WRITE", {"store": 1}), ("READ", {"load": 1})])
@pytest.mark.parametrize("what", [".bin", SUFFIX])
def test_a_transfer_that_fails_is_a_block_that_is_computed_again(tiers, store, way, what, errors):
    store.fails = lambda doing, moved: doing == way and moved[0].endswith(what)
    one = tiers()
    one.store(1, 2)
    one.forget()
    assert one.find(1, 2) == []
    assert one.tier.disk.errors == errors
    store.fails = lambda doing, moved: False
    one.store(3)
    one.forget()
    assert one.find(3) == [3]


CALLS = ["register", "prepare", "make", "transfer", "raise"]


def refusing(refused, suffix):
    return lambda call, names: call == refused and names[0].endswith(suffix)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("what", [".bin", SUFFIX])
def test_a_store_that_cannot_be_submitted_is_a_block_that_is_not_there(tiers, store, call, what):
    one = tiers()
    store.refuses = refusing(call, what)
    context = one.request()
    output = one.manager.prepare_store([one.key(1), one.key(2)], context)
    one.manager.complete_store(output.keys_to_store, context)
    until = time.monotonic() + LONG
    while not one.tier.disk.errors and time.monotonic() < until:
        one.manager._processed_jobs_this_step = False
        one.manager._maybe_process_finished_jobs()  # as every step does
        one.step()
    one.manager.on_request_finished(context)
    assert one.tier.disk.errors == {"store": 1}
    assert not one.tier.unanswered._since
    store.refuses = lambda call, names: False
    one.forget()  # waits for every job
    assert one.find(1, 2) == []
    one.store(1, 2)
    one.forget()
    assert one.find(1, 2) == [1, 2]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("what", [".bin", SUFFIX])
def test_a_load_that_cannot_be_submitted_is_a_block_that_is_computed_again(
    tiers, store, call, what
):
    one = tiers()
    one.store(1, 2)
    one.forget()
    store.refuses = refusing(call, what)
    assert one.find(1, 2) == []
    assert one.tier.disk.errors == {"load": 1}
    assert not one.tier._transfers  # nothing is written into memory that others get
    assert not one.tier.unanswered._since
    store.refuses = lambda call, names: False
    one.forget()
    assert one.find(1, 2) == [1, 2]


def test_an_engine_of_another_layout_finds_nothing(tiers, store, monkeypatch):
    tiers().store(1)
    monkeypatch.setattr(fingerprint, "_described", "another layout")
    assert tiers().find(1) == []
    monkeypatch.setattr(fingerprint, "_described", "one layout")
    assert tiers().find(1) == [1]


def test_weights_that_were_replaced_have_names_of_their_own(tiers, monkeypatch):
    weights = Weights(lambda: "other weights", "one layout")
    monkeypatch.setattr(fingerprint, "_weights", weights)
    one = tiers()
    one.store(1)
    before = one.tier._file_mapper.base_path
    weights.renamed[0]("other weights")
    assert one.tier._file_mapper.base_path != before


def test_no_folder_is_made_for_objects(tiers, tmp_path):
    one = tiers(tiers=[TIER | {"prefix": f"{tmp_path}/prefix"}])
    one.store(1)
    assert one.tier._file_mapper.base_path.startswith(f"{tmp_path}/prefix/")
    assert not (tmp_path / "prefix").exists()


def test_a_store_that_does_not_answer_is_not_used(tiers, store, monkeypatch):
    monkeypatch.setenv(TIER_PATIENCE.name, "0.2")
    one = tiers()
    one.store(1)
    one.forget()
    store.answers = False
    assert one.find(1) == []  # late, and a miss instead of waiting on
    assert one.tier.late
    asked = len(store.moved)
    assert one.find(1) == []
    assert len(store.moved) == asked
    store.answers = True
    one.tier.drain_jobs()
    assert not one.tier.late
    assert one.find(1) == [1]


def test_a_store_with_a_folder_before_it_is_a_cascade(tiers, store, tmp_path):
    both = [{"type": "fs", "root_dir": str(tmp_path)}, TIER]
    tiers(tiers=both).store(1, 2)
    assert len(names(store, SUFFIX)) == 2
    assert len(list(tmp_path.rglob("*.bin"))) == 2
    assert tiers(tiers=[TIER]).find(1, 2) == [1, 2]
    for file in tmp_path.rglob("*.bin"):
        file.unlink()
    assert tiers(tiers=both).find(1, 2) == [1, 2]


def test_two_stores_are_two_tiers(tiers, store):
    two = tiers(tiers=[TIER, TIER | {"prefix": "second"}])
    two.store(1)
    assert len(names(store, SUFFIX)) == 2
