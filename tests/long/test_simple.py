"""SimpleCPUOffloadConnector, eager and lazy, on elastic memory."""

from dataclasses import replace

import pytest

from harness.engines.fences import BARE, SIMPLE_TOGETHER, SimpleFences, assert_simple_right
from harness.engines.fixtures import MODES, PAIRS
from harness.engines.oracle import PLAIN, assert_same_round, cached, same_tokens
from harness.engines.runs import Run, load

ROUNDS = ("exact", "few", "few", "exact", "all", "all")
# Blocks of the CPU tier: room for "exact" and "few", and not for "all".
TIER = {"llama": 300, "sliding": 400}
OWN_SWITCH = (("VLLM_USE_SIMPLE_KV_OFFLOAD", "1"),)


def of(mode: str, model: str, contiguous: bool) -> Run:
    return Run(
        model=model,
        contiguous=contiguous,
        simple=mode,
        cpu_blocks=TIER[model],
        rounds=ROUNDS,
        # One of them is switched on as an operator does without a JSON document.
        environment=OWN_SWITCH if mode == "eager" and model == "llama" and contiguous else (),
    )


@PAIRS
def test_what_comes_back_from_the_cpu_tier_is_right(engine, mode, model, contiguous):
    """First the device has too few blocks for the load, and then the CPU tier too."""
    plain = engine(replace(PLAIN, model=model)).round(0)
    ours = engine(of(mode, model, contiguous))
    for index in (1, 2, 4, 5):
        assert_same_round(ours.round(index), plain)
    assert_same_round(ours.round(3), ours.round(0))
    assert cached(ours.round(1)) == 0
    assert cached(ours.round(2)) >= (1 if mode == "eager" else 0.95) * 8 * 640
    # These prompts end with a whole block, which the CPU tier has: the last token is computed.
    assert max(record["cached"] for record in ours.round(3)) == 640 - 32
    seen = ours.result["simple"]
    assert seen["loaded"] > 8 * 20
    assert seen["stored"] > 0 < seen["evicted"]
    assert seen["changed"] == seen["pinned"] == 0
    assert seen["twice"] == []
    assert seen["tiers"] == dict.fromkeys(("scheduler", "worker", "memory"), TIER[model])
    # A CPU block never touches the device's pages.
    assert seen["tier_calls"] > 100
    assert seen["device_calls"] == {}
    assert seen["managers"] == 1
    assert "KV on elastic memory: yes" in ours.log
    assert f"mode={mode}, backend=cpu" in ours.log


# Lazy mode looks ahead by blocks, not by a share of the device: the load is the larger one.
MANY = 24
PRESSED = Run(simple="eager", blocks=400, rounds=("24", "back", "shared", "24", "shared"))


def test_lazy_mode_serves_what_eager_mode_serves_and_stores_less(engine, capsys):
    """The device has room for most of the load, and who was here last comes back first."""
    plain = engine(replace(PLAIN, rounds=("24", "24")))
    eager, lazy = engine(PRESSED), engine(replace(PRESSED, simple="lazy"))
    counts = {}
    for name, ended in (("eager", eager), ("lazy", lazy)):
        assert_same_round(ended.round(1), plain.round(0)[::-1])
        assert_same_round(ended.round(3), plain.round(0))
        counts[name] = cached(ended.round(1)), ended.result["stored"][1]
    with capsys.disabled():
        for name, (tokens, blocks) in counts.items():
            print(f"\n{name}: {tokens} of {MANY * 649} tokens served, {blocks} blocks stored")
    assert counts["lazy"][0] >= 0.95 * counts["eager"][0] > 0
    assert counts["lazy"][1] < counts["eager"][1]


@MODES
def test_a_common_prefix_is_there_after_the_device_lost_it(engine, mode):
    ended = engine(replace(PRESSED, simple=mode))
    assert_same_round(ended.round(4), ended.round(2))
    # Lazy mode is best effort: under load a copy may not be there when its block is evicted.
    found = 320 if mode == "eager" else 256
    assert min(record["cached"] for record in ended.round(4)) >= found


@pytest.mark.parametrize("native", [True, False])
def test_without_the_native_pool_a_cpu_block_maps_and_unmaps_pages_of_the_device(serve, native):
    run = Run(simple="eager", revert=() if native else ("simple_offload.cpu_coordinator",))
    ended = serve(run.within(BARE), rounds=[], take_cpu_blocks=True)
    assert ended.code == 0, ended.log[-3000:]
    before, taken, freed = ended.result["charged"]
    if native:
        assert before == taken == freed > 0
    else:
        assert before < taken > freed


def test_a_cpu_pool_on_the_devices_memory_is_refused(engine):
    refused = engine(Run(simple="eager", revert=("kv_events.switch", "simple_offload.native_pool")))
    assert refused.code != 0
    assert (
        "the connector's CPU blocks are in kvcached's pool, because allocating and freeing "
        "CPU blocks would map and unmap pages of the GPU; report this with the log above, or set "
        "KVPATCH=0. [KVP409]\n" in refused.log
    )


def test_without_the_regions_what_is_loaded_by_layer_is_not_right(engine):
    """vLLM looks for all layers behind the first one, whose reservation is large enough for them.

    In the contiguous layout they are there, and nothing is seen.
    """
    expected = engine(PLAIN).round(0)
    run = of("eager", "llama", contiguous=False)
    broken = engine(replace(run, revert=("simple_offload.register_placed",)))
    loaded = len(load("few"))
    assert broken.code != 0 or same_tokens(broken.round(2), expected[:loaded]) < loaded


# All that share an engine in every way; preemption, with its own, with each mode and scheduling.
EVERY = [
    (scenario, mode, asynchronous)
    for scenario in (*SIMPLE_TOGETHER, "preempt")
    for mode in ("eager", "lazy")
    for asynchronous in (False, True)
    if scenario != "preempt" or asynchronous is (mode == "eager")
]


@pytest.mark.parametrize(("scenario", "mode", "asynchronous"), EVERY)
def test_every_stored_block_is_right_and_nothing_is_left(fences, scenario, mode, asynchronous):
    result = fences(SimpleFences).run_simple(scenario, mode, asynchronous)
    verdict = assert_simple_right(result, scenario)
    assert result["async"] is asynchronous
    if scenario == "reset_in_flight":
        assert verdict["right"] == 0
        assert verdict["reset_while_copying"] is False
        assert verdict["reset_after"] is True


@MODES
def test_with_two_ranks_every_stored_block_is_right(fences, mode):
    """The workers are processes of their own, and a copy has ended when both have said so."""
    result = fences(SimpleFences).run_simple("preempt", mode, ranks=2)
    assert assert_simple_right(result, "preempt")["right"] >= 2 * 70


def test_without_its_references_the_engine_ends(fences):
    """What the connector's references prevent; vLLM notices a block that lost its hash."""
    with pytest.raises(AssertionError, match="assert primary_hash is not None"):
        fences(SimpleFences).run_simple("finish_in_flight", "eager", unpinned=True)


@pytest.mark.parametrize("patched", [True, False])
def test_the_engine_shuts_down_while_copies_are_in_flight(serve, patched):
    run = Run(simple="eager", revert=() if patched else ("simple_offload.shutdown",))
    ended = serve(run, rounds=[load("few")], shut_down_while_copying=True)
    assert (ended.code == 0) is patched, ended.log[-3000:]
    assert ("driver: waited for the copies\n" in ended.log) is patched
    assert ("driver: copies have ended\n" in ended.log) is patched
