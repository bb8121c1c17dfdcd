"""The free memory of every rank's GPU: the least counts, and a map that failed waits."""

import logging
from types import SimpleNamespace

import pytest
from fakes import module, raising

from kvpatch.patches.elastic_memory import ranks

PAGE = 2 << 20
BUNDLE = PAGE * 4 * 2  # one page of each of 4 layers, K and V
POOL = "a-pool"


class World:
    """An engine with two ranks: what kvcached reads, and what each worker answers."""

    def __init__(self, here=100, others=(100, 100)):
        self.here = here  # pages
        self.others = list(others)  # pages of each rank; None without a GPU, or an error
        self.now = 1000.0
        self.asked = 0
        self.maps = 0
        self.manager = SimpleNamespace(
            world_size=len(others),
            pp_rank=0,
            group_id=3,
            page_size=PAGE,
            num_layers=4,
            num_kv_buffers=2,
            ipc_name=POOL,
            _avail_physical_pages_cache=here,
        )

    def available(self):
        return ranks.around_available(lambda: self.here, self.manager, (), {})

    def failed(self):
        def rolled_back(ret_index, num_from_reserved):
            self.maps += 1
            return "rolled back"

        said = ranks.around_failed_map(rolled_back, self.manager, ([], 0), {})
        assert said == "rolled back"
        if len(self.others) > 1:
            assert self.manager._avail_physical_pages_cache is None, "what was counted still counts"

    def ask(self, rank):
        self.asked += 1
        pages = self.others[rank]
        if isinstance(pages, Exception):
            raise pages
        more = {} if pages is None else {ranks.KEY: pages * BUNDLE}
        return {"status": "success", "created": True, **more}


@pytest.fixture
def world(monkeypatch):
    return install(World(), monkeypatch)


def install(world, monkeypatch):
    ipc = module(monkeypatch, "kvcached.tp_ipc_util")

    async def send(rank, message, pp_rank=0):
        assert message == {"cmd": "kv_tensors_created", "group_id": 3}
        return world.ask(rank)

    ipc._send_and_receive_message = send
    ipc._target_pp_ranks = lambda pp_rank: [pp_rank]
    monkeypatch.setattr(ranks.time, "monotonic", lambda: world.now)
    return world


@pytest.mark.parametrize(
    ("others", "available"),
    [
        ((100, 7), 7),
        ((100, 400), 100),
        # Where a rank does not answer, the others count, or what kvcached reads.
        ((ConnectionError("gone"), 5), 5),
        ((None, None), 100),
        ((ConnectionError("gone"), RuntimeError("late")), 100),
    ],
)
def test_the_least_of_all_ranks_counts(world, others, available):
    world.others = list(others)
    assert world.available() == available


def test_what_the_engine_maps_is_taken_off_without_asking(world):
    world.others = [100, 7]
    assert world.available() == 7
    world.here = 96  # four pages mapped, on every rank
    assert world.available() == 3
    world.here = 92
    assert world.available() == 0
    assert world.asked == 2  # each rank once


def test_ranks_are_asked_again_later_and_a_neighbour_that_left_is_seen(world):
    world.others = [100, 0]
    assert world.available() == 0
    world.others = [100, 100]
    world.now += ranks.PERIOD / 2
    assert world.available() == 0
    world.now += ranks.PERIOD / 2
    assert world.available() == 100
    assert world.asked == 4


def test_one_gpu_is_read_by_kvcached_alone(monkeypatch):
    world = install(World(others=(3,)), monkeypatch)
    assert world.available() == 100
    world.failed()
    assert world.available() == 100
    assert world.asked == 0


def test_a_map_that_failed_is_not_tried_again_at_once(world):
    assert world.available() == 100
    world.failed()
    assert world.maps == 1
    assert world.available() == 0
    world.now += ranks.PERIOD / 2
    assert world.available() == 0
    # The next try knows what the failed one did not.
    world.others = [100, 4]
    world.now += ranks.PERIOD / 2
    assert world.available() == 4
    assert world.asked == 4


def test_a_full_gpu_is_said_once_while_it_lasts(world, caplog):
    with caplog.at_level(logging.WARNING, "vllm.kvpatch"):
        for others in ([100, 100], [100, 0], [100, 0], [100, 50], [100, 0]):
            world.others = others
            world.available()
            world.now += ranks.PERIOD
    sentence = (
        "kvpatch: the GPU of one rank has no free memory for the KV cache, and that of the first "
        "rank has 1.6 GiB; the pool a-pool keeps to what it has mapped until there is some on "
        "every GPU"
    )
    assert [one.getMessage() for one in caplog.records] == [sentence, sentence]


@pytest.mark.parametrize(
    ("here", "other", "lines"), [(1, 0, 1), (0, 0, 0), (5, 6, 0)], ids=["full", "both", "none"]
)
def test_a_gpu_that_is_full_from_the_start_is_said_unless_the_first_is_full_too(
    world, caplog, here, other, lines
):
    world.here, world.others = here, [here, other]
    with caplog.at_level(logging.WARNING, "vllm.kvpatch"):
        assert world.available() == min(here, other)
    assert len(caplog.records) == lines


class Sent:
    def __init__(self):
        self.messages = []

    def __call__(self, sock, msg):
        self.messages.append((sock, msg))
        return "sent"


def gpu(monkeypatch, memory):
    mem_get_info = raising(memory) if isinstance(memory, Exception) else lambda: memory
    cuda = SimpleNamespace(is_available=lambda: memory is not None, mem_get_info=mem_get_info)
    module(monkeypatch, "torch", cuda=cuda)
    monkeypatch.delenv("KVCACHED_GPU_UTILIZATION", raising=False)


def answer(message):
    sent = Sent()
    for args, kwargs in ((("sock", message), {}), (("sock",), {"msg": message})):
        assert ranks.around_send(sent, None, args, kwargs) == "sent"
    (sock, first), (_, said) = sent.messages
    assert sock == "sock"
    assert first == said
    return said


CREATED = {"status": "success", "created": True}


def test_a_worker_says_what_kvcached_may_map_on_its_gpu(monkeypatch):
    gpu(monkeypatch, (4000, 10_000))
    assert answer(CREATED) == {**CREATED, ranks.KEY: 3500}  # 5 % of the GPU stay free
    assert ranks.KEY not in CREATED
    monkeypatch.setenv("KVCACHED_GPU_UTILIZATION", "0.75")
    assert answer(CREATED) == {**CREATED, ranks.KEY: 1500}
    monkeypatch.setenv("KVCACHED_GPU_UTILIZATION", "0.5")
    assert answer(CREATED) == {**CREATED, ranks.KEY: 0}


@pytest.mark.parametrize("memory", [None, RuntimeError("no driver")], ids=["host", "error"])
def test_a_worker_that_cannot_tell_says_nothing_of_it(monkeypatch, memory):
    gpu(monkeypatch, memory)
    assert answer(CREATED) == CREATED


def test_a_share_that_is_no_number_is_kvcacheds_to_complain_about_and_other_answers_stay(
    monkeypatch,
):
    gpu(monkeypatch, (4000, 10_000))
    for message in (
        {"status": "success", "newly_mapped_offsets": []},
        {"status": "success", "created": False},
        {"status": "committed"},
    ):
        assert answer(message) is message
    monkeypatch.setenv("KVCACHED_GPU_UTILIZATION", "most")
    assert answer(CREATED) == CREATED
