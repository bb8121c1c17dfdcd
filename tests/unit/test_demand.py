"""What an engine says that it needs, its revisions of limits, and its limit at birth."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import module, raising
from suspend_world import MOST, PAGE

from kvpatch import admitted, environ
from kvpatch.environ import (
    FIRST_LIMIT,
    HOST_DEVICE,
    HOST_DEVICE_DIR,
    KVCACHED_MAX_CACHED_TOKENS,
)
from kvpatch.patches.first_limit import birth, presence, rules
from kvpatch.patches.offloading import place
from kvpatch.patches.suspend import controller
from kvpatch.patches.suspend import demand as demands
from kvpatch.patches.suspend.server import answer
from kvpatch.patches.suspend.suspension import Cannot
from kvpatch.refusal import Refusal
from kvpatch.upstream import kvcached_api, requests
from kvpatch.versions import Facts, Installed

TOKENS = 16  # of a block; four blocks of 256 KiB are a page


def spec(most_blocks):
    """A group's, with the most blocks of one request; its bytes are of one layer."""
    return SimpleNamespace(
        block_size=TOKENS,
        page_size_bytes=1000,
        max_memory_usage_bytes=lambda config: most_blocks * 1000,
    )


def with_groups(world, *most_blocks):
    groups = [SimpleNamespace(kv_cache_spec=spec(most)) for most in most_blocks]
    world.scheduler.kv_cache_config = SimpleNamespace(kv_cache_groups=groups)
    world.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=most_blocks[0] * TOKENS),
        parallel_config=SimpleNamespace(world_size=1),
    )
    world.manager._avail_physical_pages_cache = 5
    world.manager._get_cached_avail_physical_pages = lambda: (
        world.manager._avail_physical_pages_cache or 3
    )
    world.manager.ipc_name = "chat"
    return world


@pytest.fixture
def engine(worlds):
    return with_groups(worlds(), 10)


def add(world, name, tokens):
    world.add(name).num_tokens = tokens


def test_the_longest_request_is_in_whole_pages_with_block_0(worlds):
    assert requests.longest(with_groups(worlds(), 10)) == 3 * PAGE  # 11 blocks
    assert requests.longest(with_groups(worlds(), 11)) == 3 * PAGE  # 12 blocks
    assert requests.longest(with_groups(worlds(), 12)) == 4 * PAGE
    assert requests.longest(with_groups(worlds(), 10, 3)) == 4 * PAGE, "groups add up"


def test_requests_need_their_tokens_and_the_next_one(engine):
    assert requests.present(engine) == 0
    add(engine, "a", 3 * TOKENS)
    assert requests.present(engine) == PAGE
    add(engine, "b", 1)
    assert requests.present(engine) == 2 * PAGE  # five blocks


def test_a_group_of_a_window_needs_no_more_than_its_window(worlds):
    engine = with_groups(worlds(), 100, 2)
    add(engine, "a", 30 * TOKENS)
    assert requests.present(engine) == 9 * PAGE  # 31 and 2 blocks


def test_an_engine_says_what_it_needs(engine, monkeypatch):
    platform(monkeypatch, None, cpu=True)
    monkeypatch.setenv(HOST_DEVICE_DIR.name, "/dev/shm/one")
    add(engine, "a", 5 * TOKENS)
    assert answer(engine.suspension, {"verb": "demand"}, 0.0) == {
        "device": "host device /dev/shm/one",
        "mapped": 3 * PAGE,
        "free": 3 * PAGE,
        "page": PAGE,
        "least": 3 * PAGE,
        "longest": 10 * TOKENS,
        "needs": 2 * PAGE,
        "lends": False,
    }


def test_an_engine_that_stores_what_it_gives_lends_what_a_request_needs(worlds, monkeypatch):
    platform(monkeypatch, None, cpu=True)
    giving = with_groups(worlds(gives=True), 10)
    assert answer(giving.suspension, {"verb": "demand"}, 0.0)["lends"] is True


@pytest.fixture
def clock(monkeypatch):
    platform(monkeypatch, None, cpu=True)
    monkeypatch.delenv(KVCACHED_MAX_CACHED_TOKENS.name, raising=False)
    now = SimpleNamespace(now=100.0)
    monkeypatch.setattr(controller, "time", SimpleNamespace(monotonic=lambda: now.now))
    return now


def looked_at(engine, **said):
    answer(engine.suspension, {"verb": "demand", "controls": 13.0} | said, 0.0)


@pytest.mark.parametrize(
    ("alone", "then"),
    [(5 * PAGE, 5 * PAGE), (None, 2 * PAGE), ("all", 2 * PAGE), (1 << 60, MOST * PAGE), (0, PAGE)],
)
def test_without_its_controller_an_engine_takes_what_it_was_told_to(engine, clock, alone, then):
    looked_at(engine, alone=alone)
    engine.suspension.limit(2 * PAGE, 1)
    clock.now += 12
    engine.suspension.advance()
    assert engine.manager.limit == 2 * PAGE, "it is heard of"
    clock.now += 2
    engine.suspension.advance()
    assert engine.manager.limit == then
    engine.suspension.limit(3 * PAGE)
    engine.suspension.advance()
    assert engine.manager.limit == 3 * PAGE, "once"


@pytest.mark.parametrize("by", ["a controller that says no more", "an operator"])
def test_a_limit_outlives_the_controller(engine, clock, by):
    looked_at(engine, alone=5 * PAGE)
    if by == "an operator":
        engine.suspension.limit(2 * PAGE)
    else:
        looked_at(engine)
        engine.suspension.limit(2 * PAGE, 1)
    clock.now += 20
    engine.suspension.advance()
    assert engine.manager.limit == 2 * PAGE


def test_a_prefix_cache_fills_its_limit_while_a_controller_sees_to_that(engine, clock, monkeypatch):
    asked, own = {"verb": "demand", "controls": 13.0}, engine.pool.max_cached_blocks
    for later, bound in ((0, -1), (12, -1), (12, -1), (14, own)):
        clock.now += later
        if later < 13:
            answer(engine.suspension, asked, 0.0)
        engine.suspension.advance()
        assert engine.pool.max_cached_blocks == bound
    for other in ({}, {"controls": None}, {"controls": "soon"}, {"controls": -1}):  # who only looks
        answer(engine.suspension, {"verb": "demand"} | other, 0.0)
        assert engine.pool.max_cached_blocks == own
    monkeypatch.setenv(KVCACHED_MAX_CACHED_TOKENS.name, "640")
    answer(engine.suspension, asked, 0.0)
    assert engine.pool.max_cached_blocks == own


def platform(monkeypatch, uuid, cpu=False):
    here = SimpleNamespace(get_device_uuid=uuid, is_cpu=lambda: cpu)
    module(monkeypatch, "vllm.platforms", current_platform=here)
    monkeypatch.setenv(HOST_DEVICE.name, "1GiB")  # which a GPU does not look at


def test_a_device_has_the_name_of_its_makers_library(engine, monkeypatch):
    platform(monkeypatch, lambda rank: f"GPU-{9 - rank}")
    assert demands.device(engine) == "GPU-9"
    engine.vllm_config.parallel_config.world_size = 2
    assert demands.device(engine) == "GPU-8, GPU-9", "in one order, whichever is the first rank"


@pytest.mark.parametrize("uuid", [lambda rank: "", raising(NotImplementedError("no such call"))])
def test_a_device_without_a_name_is_refused(uuid, engine, monkeypatch):
    platform(monkeypatch, uuid)
    with pytest.raises(Cannot, match="vLLM does not know its device"):
        demands.device(engine)


def test_a_limit_is_refused_that_was_meant_for_an_earlier_one(worlds):
    suspension = worlds().suspension
    ask = {"verb": "limit", "size": 4 * PAGE, "revision": 1}
    answer(suspension, ask, 0.0)
    assert (suspension.said["limit"], suspension.revision) == (4 * PAGE, 1)
    with pytest.raises(Cannot, match=r"was set by somebody else \(revision 1\)"):
        answer(suspension, ask | {"size": 5 * PAGE}, 0.0)
    answer(suspension, {"verb": "limit", "size": 6 * PAGE}, 0.0)  # a person's
    with pytest.raises(Cannot, match=r"\(revision 2\)"):
        answer(suspension, ask | {"revision": 2}, 0.0)
    assert suspension.said["limit"] == 6 * PAGE
    with pytest.raises(Cannot, match="it started with"):
        answer(suspension, ask | {"size": 99 * PAGE, "revision": 3}, 0.0)
    assert suspension.revision == 2, "a limit that was not set is none"


@pytest.mark.parametrize("revision", ["1", True, 1.5])
def test_a_revision_that_is_no_number_is_refused(worlds, revision):
    with pytest.raises(Cannot, match="the revision is no number"):
        asked = {"verb": "limit", "size": 4 * PAGE, "revision": revision}
        answer(worlds().suspension, asked, 0.0)


def born(world, monkeypatch, text):
    """Let an engine start with a first limit; return what happened in order."""
    happened = []
    monkeypatch.setenv(FIRST_LIMIT.name, text)
    resize = world.manager.resize
    world.manager.resize = lambda size: happened.append("limit") or resize(size)
    birth.around_engine_start(lambda config: happened.append("start"), world, (None,), {})
    return happened


def test_an_engine_is_limited_before_it_has_requests(engine, monkeypatch):
    assert born(engine, monkeypatch, "4MiB") == ["start", "limit"]
    assert engine.manager.limit == 4 * PAGE  # what kvctl and the neighbours see
    assert engine.manager.total == 4  # at once


def test_a_first_limit_may_be_a_part_of_what_it_starts_with(engine, monkeypatch):
    born(engine, monkeypatch, "50%")
    assert engine.manager.limit == MOST * PAGE // 2


@pytest.mark.parametrize("text", ["8MiB", "1GiB", "100%"])
def test_a_first_limit_of_all_it_has_is_none(text, engine, monkeypatch):
    assert born(engine, monkeypatch, text) == ["start"]
    assert engine.manager.limit == MOST * PAGE


@pytest.mark.parametrize("text", ["2MiB", "30%"])
def test_a_first_limit_below_one_request_is_refused_with_a_sentence(text, engine, monkeypatch):
    with pytest.raises(Refusal) as refused:
        born(engine, monkeypatch, text)
    size = "2 MiB" if text == "2MiB" else "2.4 MiB"
    assert str(refused.value) == (
        f"kvpatch refuses to start vLLM: KVPATCH_FIRST_LIMIT is {text}, which is {size} of this "
        "engine's KV cache, and a request of 160 tokens needs 3 MiB, because such a request would "
        "wait for ever; set "
        "KVPATCH_FIRST_LIMIT to 3 MiB or more, or a smaller --max-model-len. [KVP424]"
    )
    assert refused.value.code == "KVP424"
    assert engine.manager.limit == MOST * PAGE


def test_unset_it_is_off(monkeypatch):
    monkeypatch.delenv(FIRST_LIMIT.name, raising=False)
    assert not presence.wanted()
    monkeypatch.setenv(FIRST_LIMIT.name, "25%")
    assert presence.wanted()


@pytest.mark.parametrize(
    ("text", "size"), [("8GiB", 8 << 30), ("25%", 25), ("12.5%", 12), ("100%", 100), ("7", 7)]
)
def test_sizes_and_parts(text, size):
    assert environ.share(text).of(100) == size


@pytest.mark.parametrize("text", ["0%", "101%", "-5%", "%", "5%5", "much", "8PB", ""])
def test_what_is_neither(text):
    with pytest.raises(ValueError, match=r"^it is (neither a size nor a part|not a size)"):
        environ.share(text)


def test_it_is_refused_where_no_engine_was_seen_with_it():
    (rule,) = rules.RULES
    for release in ("0.16.0", "0.32.0"):
        vllm, kvcached = Installed.release("vllm", release), Installed.release("kvcached", "0.1.6")
        alone = SimpleNamespace(kv_transfer_config=None)
        on = rule.refusal(alone, Facts(vllm, kvcached, {FIRST_LIMIT.name: "8GiB"}))
        ran = admitted.ran_with(rules.NAME, vllm, [place.OFFLOADING])
        assert (on is not None) is not ran
        assert rule.refusal(alone, Facts(vllm, kvcached, {})) is None


def test_an_engine_that_cannot_set_its_own_limit_runs_on(engine, clock, monkeypatch):
    """As where a cleaner has removed the pool in /dev/shm."""
    looked_at(engine, alone=5 * PAGE)
    clock.now += 20
    monkeypatch.setattr(kvcached_api, "set_limit", lambda *size: Path("/nowhere/pool").read_text())
    engine.suspension.advance()
    assert engine.manager.limit == MOST * PAGE
