"""Debug mode: each check notices its fault, for the workers of every release."""

import importlib
import pickle
from types import SimpleNamespace

import pytest
from fakes import OffloadingConnector, module
from packaging.version import Version

from kvpatch import patches, state
from kvpatch.environ import DEBUG
from kvpatch.patches import debug
from kvpatch.patches.debug import audit, checksums, simple
from kvpatch.patches.debug.audit import Violation
from kvpatch.patches.fence.fence import Fence
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.patches.simple_offload.failures import CopyFailed, Failure
from kvpatch.supported import RELEASES
from kvpatch.upstream.vllm_api import by_group, places


class Row(bytes):
    """A row of a tensor, as far as a checksum looks at it."""

    def __getitem__(self, key):
        return Row(super().__getitem__(key))

    def cpu(self):
        return self

    def numpy(self):
        return self


class Rows(list[Row]):
    """A tensor with a row of four bytes for each block."""

    shape = (8, 4)

    def view(self, *shape):
        return self


def rows():
    return Rows(Row([block] * 4) for block in range(8))


class Blocks:
    """A spec of blocks on the device."""

    def __init__(self, *ids, sizes=None, first=None):
        self.block_ids = list(ids)
        self.group_sizes, self.block_indices = sizes, first

    @staticmethod
    def medium():
        return "GPU"


class Chunks(Blocks):
    """A spec of chunks of the CPU tier."""

    @staticmethod
    def medium():
        return "CPU"


class Copies:
    """Copies at once, as the workers and backends of every release are asked to."""

    def __init__(self, device):
        self.device = device
        self.tier = {}
        self.ended = []
        self.waited = []
        self.said = []

    def submit_store(self, job_id, device, tier):
        for block, place in places(by_group(device, 1), tier, 1):
            self.tier[place.chunk] = self.device[block]
        self.ended.append(SimpleNamespace(job_id=job_id))
        return True

    def submit_load(self, job_id, tier, device, expedited=False):
        for block, place in places(by_group(device, 1), tier, 1):
            self.device[block] = self.tier[place.chunk]
        if expedited:
            self.said.append("expedited")
        self.ended.append(SimpleNamespace(job_id=job_id))
        return True

    def transfer_async(self, job_id, spec):
        source, destination = spec
        if source.medium() == "GPU":
            return self.submit_store(job_id, source, destination)
        return self.submit_load(job_id, source, destination)

    def get_finished(self):
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids):
        self.waited.append(job_ids)


def canonical(device, copied=4):
    ref = SimpleNamespace(tensor_idx=0, page_size_bytes=copied)
    return SimpleNamespace(tensors=[SimpleNamespace(tensor=device)], group_data_refs=[[ref]])


class Worker:
    """An ``OffloadingConnectorWorker`` of a release, with the debug mode's patches on it.

    Args:
        release: decides which patches, which methods they are on, and what transfers are.
    """

    def __init__(self, release, **attributes):
        self.device = rows()
        self.copies = Copies(self.device)
        self.spec = SimpleNamespace(blocks_per_chunk=1)
        self.worker = None
        self._unsubmitted_store_jobs = []
        self.release = Version(release)
        self.by_request = self.release < Version("0.21")
        self.in_pairs = self.release < Version("0.25")
        if self.by_request:
            self._jobs = {}
        self.__dict__.update(attributes)
        self.patches = {
            patch.target.rpartition(".")[2]: load(patch.wrapper)
            for patch in debug.FEATURE.at(self.release)
            if "OffloadingConnectorWorker" in patch.target
        }
        arguments = (canonical(self.device),)
        if self.release < Version("0.19"):
            arguments = ({"region": self.device}, {})
        self.call("_register_handlers" if self.in_pairs else "_init_worker", *arguments)

    def call(self, method, *args):
        around = self.patches.get(method, lambda wrapped, instance, args, kwargs: wrapped(*args))
        around(lambda *args: getattr(self, f"its{method}")(*args), self, args, {})

    def its_register_handlers(self, *args):
        self.worker = self.copies

    its_init_worker = its_register_handlers

    def itsprepare_store_kv(self, metadata):
        for job_id, job in metadata.store_jobs.items():
            if self.by_request:
                self._jobs[job_id] = (job.req_id, True)
            self._unsubmitted_store_jobs.append((job_id, job.transfer_spec))

    def itsstart_kv_transfers(self, metadata):
        self.submit()
        for job_id, job in metadata.load_jobs.items():
            if self.by_request:
                self._jobs[job_id] = (job.req_id, False)
            if self.in_pairs:
                self.worker.transfer_async(job_id, job.transfer_spec)
            else:
                self.worker.submit_load(job_id, *job.transfer_spec)

    def submit(self):
        for job_id, pair in self._unsubmitted_store_jobs:
            if self.in_pairs:
                self.worker.transfer_async(job_id, pair)
            else:
                self.worker.submit_store(job_id, *pair)
        self._unsubmitted_store_jobs.clear()

    def blocks(self, *ids):
        if self.release < Version("0.19"):
            return Blocks(*ids)
        return Blocks(*ids, sizes=[len(ids)], first=[0])

    def hand_over(self, job_id, blocks, chunks):
        metadata = step(stores={job_id: (self.blocks(*blocks), Chunks(*chunks))})
        self.call("prepare_store_kv", metadata)

    def start(self, loads=None, promoted=None):
        metadata = step(loads=loads or {})
        if promoted is not None:
            state.attach(metadata, checksums.PromotedChunks(promoted))
        self.call("start_kv_transfers", metadata)

    def store(self, job_id, blocks, chunks):
        self.hand_over(job_id, blocks, chunks)
        self.start()
        self.worker.get_finished()

    def load(self, job_id, chunks, blocks):
        """Load blocks, and return what has ended."""
        self.launch_load(job_id, chunks, blocks)
        return self.worker.get_finished()

    def launch_load(self, job_id, chunks, blocks):
        self.start({job_id: (Chunks(*chunks), self.blocks(*blocks))})


def load(reference):
    module, _, name = reference.partition(":")
    return getattr(importlib.import_module(module), name)


def step(stores=None, loads=None):
    def jobs(of):
        return {
            job_id: SimpleNamespace(
                req_id="the request", transfer_spec=pair, src_spec=pair[0], dst_spec=pair[1]
            )
            for job_id, pair in (of or {}).items()
        }

    return SimpleNamespace(store_jobs=jobs(stores), load_jobs=jobs(loads))


@pytest.fixture(params=["0.16.0", "0.18.1", "0.19.1", "0.20.2", "0.21.0", "0.24.0", "0.25.1",
                        "0.26.0", "0.28.0", "0.33.0"])  # fmt: skip
def worker(request):
    return Worker(request.param)


def violation(what, block, job, page="unknown"):
    message = f"kvpatch KVPATCH_DEBUG: {what}: block {block} of page {page}, job {job}"
    return f"^{message}, request the request$"


CHANGED = "a block changed before its store was launched"
OTHER = "a load brought other bytes than were stored"


def test_what_is_stored_and_loaded_as_it_was_passes(worker):
    worker.store(1, (2, 3), (0, 1))
    assert [result.job_id for result in worker.load(2, (0, 1), (6, 7))] == [2]
    assert worker.worker.checked == {"stored": 2, "loaded": 2, "unverified": 0}
    assert worker.device[6:] == [Row([2] * 4), Row([3] * 4)]


def test_a_block_that_changed_before_its_store_was_launched(worker):
    worker.hand_over(1, (2, 3), (0, 1))
    worker.device[3] = Row([9] * 4)
    with pytest.raises(Violation, match=violation(CHANGED, 3, 1)):
        worker.start()


@pytest.mark.parametrize(
    ("stored", "changed", "loaded", "block", "page"),
    [((2, 3), 1, (0, 1), 7, 1), ((2,), 4, (4,), 6, "unknown")],
    ids=["other bytes", "nobody stored it"],
)
def test_a_load_that_brings_other_bytes(worker, stored, changed, loaded, block, page):
    worker.store(1, stored, range(len(stored)))
    worker.copies.tier[changed] = Row([9] * 4)
    worker.worker.blocks_per_page = 5 if page == 1 else 0
    with pytest.raises(Violation, match=violation(OTHER, block, 2, page)):
        worker.load(2, loaded, (6, 7)[: len(loaded)])


def test_a_load_expects_what_was_there_when_it_was_launched(worker):
    worker.store(1, (2,), (0,))
    worker.launch_load(2, (0,), (6,))
    worker.hand_over(3, (5,), (0,))
    worker.submit()
    worker.worker.get_finished()
    assert worker.worker.checked["loaded"] == 1


def test_what_the_audit_does_not_define_is_the_workers(worker):
    worker.worker.wait({5})
    assert worker.copies.waited == [{5}]
    assert worker.worker.device is worker.device


@pytest.mark.parametrize("release", ["0.24.0", "0.28.0", "0.32.0"])
def test_what_a_tier_promoted_is_accepted_and_nothing_else(release):
    worker = Worker(release)
    worker.store(1, (2, 3), (0, 1))
    worker.start(promoted=[0])
    worker.copies.tier[0] = worker.copies.tier[1] = Row([9] * 4)
    worker.load(2, (0,), (6,))
    assert worker.worker.checked == {"stored": 2, "loaded": 0, "unverified": 1}
    with pytest.raises(Violation, match=violation(OTHER, 7, 3)):
        worker.load(3, (1,), (7,))


def test_what_the_device_stores_after_a_promotion_is_verified():
    worker = Worker("0.32.0")
    worker.start(promoted=[0])
    worker.store(1, (2,), (0,))
    worker.copies.tier[0] = Row([9] * 4)
    with pytest.raises(Violation, match=violation(OTHER, 6, 2)):
        worker.load(2, (0,), (6,))


@pytest.mark.parametrize("name", ["block_ids", "chunk_ids"])
def test_promotions_reach_the_workers_with_the_next_step(name):
    manager = SimpleNamespace(_pending_load_submissions={})
    planner, ran = SimpleNamespace(manager=manager), []

    def build(promotions):
        manager._pending_load_submissions = {
            0: {f"r{n}": SimpleNamespace(**{name: ids}) for n, ids in enumerate(promotions)}
        }
        checksums.around_promotions(lambda: ran.append("flush"), manager, (), {})
        meta = checksums.around_build(lambda output: step(), planner, (object(),), {})
        return state.find(meta, checksums.PromotedChunks)

    assert build([]) is None
    assert build([[3, 4], [7]]) == checksums.PromotedChunks([3, 4, 7])
    assert build([]) is None  # told once
    assert ran == ["flush"] * 3


def test_promotions_reach_workers_in_other_processes():
    metadata = step()
    state.attach(metadata, checksums.PromotedChunks([3]))
    received = pickle.loads(pickle.dumps(metadata))
    assert state.find(received, checksums.PromotedChunks) == checksums.PromotedChunks([3])


def test_a_cpu_tier_without_secondary_tiers_has_no_promotions():
    planner = SimpleNamespace(manager=object())
    meta = checksums.around_build(lambda output: step(), planner, (object(),), {})
    assert state.find(meta, checksums.PromotedChunks) is None


def test_a_rank_that_does_not_store_cannot_verify():
    worker = Worker("0.32.0", _is_store_writer=False)
    worker.hand_over(1, (2,), (0,))
    worker._unsubmitted_store_jobs.clear()
    assert worker.worker._handed == {}  # nobody would launch it
    worker.copies.tier[0] = Row([2] * 4)
    worker.load(2, (0,), (6,))
    assert worker.worker.checked == {"stored": 0, "loaded": 0, "unverified": 1}


def test_a_load_that_is_waited_for_is_verified_before_it_is_computed_on():
    worker = Worker("0.33.0")
    worker.store(1, (2,), (0,))
    worker.worker.submit_load(2, Chunks(0), worker.blocks(6), expedited=True)
    worker.worker.wait({2})
    worker.device[6] = Row([9] * 4)
    worker.worker.get_finished()
    assert worker.copies.said == ["expedited"]
    assert worker.worker.checked["loaded"] == 1


def test_only_the_bytes_that_are_copied_are_compared():
    worker = Worker("0.32.0")
    worker.worker._groups = checksums.regions_of(canonical(worker.device, copied=2))
    worker.store(1, (2,), (0,))
    worker.copies.tier[0] = Row([2, 2, 0, 0])
    worker.load(2, (0,), (6,))
    assert worker.worker.checked["loaded"] == 1


def test_groups_and_chunks_of_several_blocks_are_told_apart():
    device = rows()
    audited = checksums.AuditedWorker(Copies(device), [[(device, 4)], [(device, 4)]], 2)
    audited.check_store(1, Blocks(1, 2, 3, sizes=[1, 2], first=[1, 4]), Chunks(0, 1))
    device[1], device[2], device[3] = Row([0] * 4), Row([0] * 4), Row([3] * 4)
    audited.expect_load(2, Blocks(4, sizes=[0, 1], first=[0, 5]), Chunks(1))
    device[4] = Row([3] * 4)
    audited.end_load(2)
    audited.expect_load(3, Blocks(4, sizes=[1, 0], first=[1, 0]), Chunks(0))
    with pytest.raises(Violation):
        audited.end_load(3)


@pytest.mark.parametrize("promoted", [False, True])
def test_a_store_ends_what_was_in_its_chunk_before(promoted):
    device = rows()
    audited = checksums.AuditedWorker(Copies(device), [[(device, 4)]] * 2, 2)
    if promoted:
        audited.forget([0])
    else:
        audited.check_store(1, Blocks(1, 2, sizes=[2, 0], first=[0, 0]), Chunks(0))
    audited.check_store(2, Blocks(3, sizes=[0, 1], first=[0, 0]), Chunks(0))
    audited.expect_load(3, Blocks(2, sizes=[1, 0], first=[1, 0]), Chunks(0))
    with pytest.raises(Violation):
        audited.end_load(3)


class Event:
    """The end of a copy that runs when it is asked for."""

    def __init__(self, copy):
        self.copy = copy
        self.ended = False

    def query(self):
        if self.ended:
            self.copy()
        return self.ended

    def synchronize(self):
        self.ended = True
        self.query()


class Backend:
    """A copy backend; up to 0.23 it knows no event of the computation."""

    def __init__(self, device):
        self.device = device
        self.tier = {}
        self.shut_down = False

    def launch_copy(self, src_blocks, dst_blocks, is_store, event_idx, events_list, **more):
        source = self.device if is_store else self.tier
        destination = self.tier if is_store else self.device

        def copy():
            for one, other in zip(src_blocks, dst_blocks, strict=True):
                destination[other] = source[one]

        events_list.append((event_idx, Event(copy)))

    def shutdown(self):
        self.shut_down = True


class SimpleWorker:
    """A ``SimpleCPUOffloadWorker`` in debug mode."""

    def __init__(self):
        self.device = rows()
        self.gpu_kv_caches = None
        self._backend = None
        self._connector_metadata = SimpleNamespace(load_event_to_reqs={5: ["the request"]})
        self.stores = []
        self.loads = []

    def register(self, kv_caches):
        def its_own(kv_caches):
            self.gpu_kv_caches = kv_caches
            self._backend = Backend(self.device)

        simple.around_register(its_own, self, (kv_caches,), {})

    def copy(self, source, destination, is_store, index):
        self._backend.launch_copy(
            source,
            destination,
            is_store=is_store,
            event_idx=index,
            events_list=self.stores if is_store else self.loads,
        )


@pytest.fixture
def simple_worker():
    worker = SimpleWorker()
    worker.register({"region0": worker.device})
    worker.copy([2, 3], [0, 1], True, 4)
    worker.stores[0][1].synchronize()
    worker.copy([0, 1], [6, 7], False, 5)
    return worker


@pytest.mark.parametrize("wait", [False, True])
def test_simple_what_is_loaded_as_it_was_stored_passes(simple_worker, wait):
    ((index, event),) = simple_worker.loads
    assert index == 5
    assert event.query() is False
    assert simple_worker._backend.checked["loaded"] == 0
    if wait:
        event.synchronize()
    else:
        event._event.ended = True
        assert event.query() is True
    assert simple_worker._backend.checked == {"stored": 2, "loaded": 2, "unverified": 0}


def test_simple_a_load_is_verified_once(simple_worker):
    ((_, event),) = simple_worker.loads
    event.synchronize()
    simple_worker._backend._audited.tier[0] = Row([9] * 4)  # handed to others since
    event.query()
    assert simple_worker._backend.checked["loaded"] == 2


@pytest.mark.parametrize("wait", [False, True])
def test_simple_a_load_that_brings_other_bytes(simple_worker, wait):
    ((_, event),) = simple_worker.loads
    simple_worker._backend._audited.tier[1] = Row([9] * 4)
    event._event.ended = True
    with pytest.raises(Violation, match=violation(OTHER, 7, 5)):
        event.synchronize() if wait else event.query()


@pytest.mark.parametrize("wait", [False, True])
def test_simple_a_load_that_failed_has_nothing_to_verify(wait):
    """Its blocks have whatever was there: vLLM is told, and does not use them."""
    verified = []
    events = []
    failure = Failure(RuntimeError("err=1"), 5, False, [6, 7], in_a_row=1, lost=False)
    simple.VerifyingEvents(events, lambda: verified.append(True)).append((5, failure))
    ((_, event),) = events
    ask = event.synchronize if wait else event.query
    with pytest.raises(CopyFailed):
        ask()
    failure.noted = True
    ask()
    assert verified == []


def test_simple_a_block_that_changed_before_it_was_copied():
    worker = SimpleWorker()
    worker.register({"region0": worker.device})
    worker.copy([2], [0], True, 4)
    worker.device[2] = Row([9] * 4)
    worker.stores[0][1].synchronize()
    worker.copy([0], [6], False, 5)
    with pytest.raises(Violation, match=violation(OTHER, 6, 5)):
        worker.loads[0][1].synchronize()


def test_simple_a_load_of_what_nobody_stored(simple_worker):
    simple_worker._backend._audited.tier[9] = Row([9] * 4)
    simple_worker.copy([9], [5], False, 6)
    with pytest.raises(Violation, match="block 5 of page unknown, job 6, request unknown"):
        simple_worker.loads[1][1].synchronize()


def test_simple_what_the_audit_does_not_define_is_the_backends(simple_worker):
    simple_worker._backend.shutdown()
    assert simple_worker._backend._audited.shut_down


def test_simple_a_model_without_kv_caches_has_no_backend():
    worker = SimpleWorker()
    simple.around_register(lambda kv_caches: None, worker, ({},), {})
    assert worker._backend is None


class Engine:
    """An ``EngineCore`` whose fence lets pages of ten blocks go, of a release."""

    def __init__(self, release, planner):
        self.release = Version(release)
        part = object() if planner is None else OffloadingConnector(connector_scheduler=planner)
        self.manager = SimpleNamespace()
        self.scheduler = SimpleNamespace(
            connector=SimpleNamespace(_connectors=[object(), part]),
            kv_cache_manager=SimpleNamespace(
                block_pool=SimpleNamespace(kv_cache_manager=self.manager),
                get_block_ids={"the request": ([12, 34], [35]), "preempted": ([70],)}.__getitem__,
            ),
        )
        self.rpcs = []
        self.model_executor = SimpleNamespace(
            collective_rpc=lambda function, args: self.rpcs.append((function, args))
        )

    def install(self, fenced=True):
        (patch,) = (
            patch
            for patch in debug.FEATURE.at(self.release)
            if patch.target.endswith("_kvcached_install_ordered_unmap")
        )

        def its_own():
            if fenced:
                fence = Fence(lambda page: (page * 10, page * 10 + 10), workers=1)
                state.attach(self.manager, Fenced(fence, self.manager, self.scheduler))

        load(patch.wrapper)(its_own, self, (), {})

    def release_pages(self, *pages):
        fenced = state.find(self.manager, Fenced)
        assert fenced is not None
        for observer in fenced.on_release:
            observer(list(pages))


def of_release(release):
    """The connector's scheduler with a store of blocks 12, 34 and 35 on record."""
    if Version(release) < Version("0.21"):
        return SimpleNamespace(
            _reqs_being_stored={"the request": {"a key"}, "preempted": set()}, _reqs_being_loaded={}
        )
    names = (
        ("non_sliding_window_block_ids", "sliding_window_block_ids")
        if Version(release) < Version("0.28")
        else ("deferred_fence_block_ids", "fenced_block_ids")
    )
    job = SimpleNamespace(req_id="the request", **dict(zip(names, ([12, 34], [35]), strict=True)))
    load_job = SimpleNamespace(req_id="other", **dict.fromkeys(names))
    return SimpleNamespace(_jobs={8: job, 9: load_job})


@pytest.mark.parametrize("release", ["0.16.0", "0.20.2", "0.21.0", "0.27.1", "0.28.0", "0.33.0"])
def test_a_page_that_is_unmapped_under_a_transfer(release):
    engine = Engine(release, of_release(release))
    engine.install()
    assert engine.rpcs == [(audit.tell_page_size, (10,))]
    engine.release_pages()
    engine.release_pages(0, 2, 4, 7)
    job = "8" if Version(release) >= Version("0.21") else "unknown"
    said = f"a page is unmapped under a transfer: block 34 of page 3, job {job}, request the req"
    with pytest.raises(Violation, match=said):
        engine.release_pages(2, 3)
    with pytest.raises(Violation, match="block 12 of page 1"):
        engine.release_pages(1)


@pytest.mark.parametrize("release", ["0.16.0", "0.20.2"])
def test_loads_of_requests_are_on_record_too(release):
    planner = SimpleNamespace(_reqs_being_stored={}, _reqs_being_loaded={"the request": {"key"}})
    engine = Engine(release, planner)
    engine.install()
    with pytest.raises(Violation, match="block 12 of page 1"):
        engine.release_pages(1)


def test_simple_alone_has_nothing_to_look_up_before_an_unmapping():
    engine = Engine("0.32.0", None)
    engine.install()
    engine.release_pages(0, 1)
    assert engine.rpcs == [(audit.tell_page_size, (10,))]


def test_without_a_fence_there_is_nothing_to_watch():
    engine = Engine("0.32.0", of_release("0.32.0"))
    engine.install(fenced=False)
    assert engine.rpcs == []


def test_workers_are_told_the_size_of_a_page_and_count(simple_worker, monkeypatch):
    worker = Worker("0.32.0")
    worker.store(1, (2,), (0,))
    parts = [
        SimpleNamespace(connector_worker=worker),
        SimpleNamespace(worker_handler=simple_worker),
        SimpleNamespace(worker_handler=None),
    ]
    transfer = module(monkeypatch, "vllm.distributed.kv_transfer")
    transfer.get_kv_transfer_group = lambda: SimpleNamespace(_connectors=parts)
    audit.tell_page_size(None, 5)
    assert worker.worker.blocks_per_page == simple_worker._backend.blocks_per_page == 5
    assert audit.checked(None) == {"stored": 3, "loaded": 0, "unverified": 0}


@pytest.mark.parametrize(("value", "on"), [("", False), ("0", False), ("1", True), ("on", True)])
def test_it_is_off_by_default(monkeypatch, value, on):
    monkeypatch.setenv(DEBUG.name, value)
    assert audit.wanted() is on
    assert debug.FEATURE.wanted is not None
    assert load(debug.FEATURE.wanted) is audit.wanted


def test_what_a_release_has_is_audited():
    for release in filter(debug.FEATURE.span.__contains__, map(Version, RELEASES)):
        every = {patch.id for patch in debug.FEATURE.at(release)}
        assert ("debug.simple" in every) is (release >= Version("0.19")), release
        assert ("debug.promotions" in every) is (release >= Version("0.24")), release


def test_its_rows_are_applied_outside_of_those_they_look_at():
    names = [feature.name for feature in patches.FEATURES]
    assert names.index("debug") > max(
        names.index(name) for name in ("offloading", "simple-offload", "fence", "secondary-tiers")
    )
