"""What the engines of a cell are asked, without an engine."""

from dataclasses import replace

import pytest

from harness.engines import runs
from harness.engines.plugins import UNTIL_IT_RAN
from harness.engines.runs import (
    BLOCK,
    Run,
    block_bytes,
    block_tokens,
    chunk_tokens,
    engine_arguments,
    restored_tokens,
)
from harness.matrix import axes, cells
from harness.models import IMAGE
from kvpatch import admitted
from kvpatch.matrix.verdicts import NONE, Cell

CELL = Cell("0.32.0", "V2", "contiguous", "Offloading", "full attention")


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Return the runs of plain vLLM and of kvpatch's engine for a cell, and its trial."""

    def asked(cell):
        seen = []
        engines = cells.Engines("0.32.0", tmp_path, print)
        monkeypatch.setattr(engines, "run", lambda run, trial, name: seen.append((run, trial)))
        trial = cells.trial_of(cell)
        with monkeypatch.context() as patched:
            patched.setattr(cells.giving, "run", lambda run, *given: seen.append((run, trial)))
            patched.setattr(cells.giving, "judge", lambda *given: {"right": True})
            for name in ("judge", "judge_each"):
                patched.setattr(cells, name, lambda *given: {})
            engines.compare(cell)
        (plain, _), (ours, trial) = seen
        return plain, ours, trial

    return asked


def every_cell():
    return [cell for cell in axes.cells("0.32.0") if cell.layout == "contiguous"]


@pytest.mark.parametrize(
    "cell", every_cell(), ids=lambda cell: "-".join(vars(cell).values()).replace(" ", "-")
)
def test_plain_vllm_has_what_is_turned_on_and_no_connector(asked, cell):
    plain, ours, _ = asked(cell)
    assert (plain.kvpatch, plain.offload, ours.kvpatch, ours.offload) == (False, False, True, True)
    for name in ("speculation", "ranks", "stages", "engines", "cache_dtype", "settings"):
        assert getattr(plain, name) == getattr(ours, name)
    model = cells.MODELS[cell.model]
    if model == "llama":  # the others are of their kind also where they draft
        model = cells.FEATURES[cell.feature].get("model", model)
    assert plain.model == ours.model == model
    assert plain.runner == ours.runner == cell.runner.lower()


def test_plain_vllm_alone_is_the_reference_that_a_cell_has(asked, tmp_path, monkeypatch):
    seen = []

    def run(wanted, trial, name):
        seen.append((wanted, name))
        return {"failed": "ValueError: no"}

    for cell in every_cell():
        engines = cells.Engines("0.32.0", tmp_path, print)
        monkeypatch.setattr(engines, "run", run)
        assert engines.plain(cell) is engines.plain(cell)  # of one run
        reference, _, _ = asked(cell)
        assert seen == [(reference, seen[0][1])]
        assert seen.pop()[1].startswith(f"plain-{cell.runner}-")


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("INFO: loading\nValueError: no such backend\n", "ValueError: no such backend"),
        (
            "(EngineCore pid=12) AssertionError: intermediate_tensors\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n",
            "AssertionError: intermediate_tensors",
        ),
        (
            "triton.compiler.errors.InterpreterError: of /tmp/x/y/kernel.py line 3\nbye\n",
            "triton.compiler.errors.InterpreterError: of kernel.py line 3",
        ),
        ("one\nno end after 600 s\n", "no end after 600 s"),
        ("Exception: WorkerProc initialization failed\n", "Exception: WorkerProc initialization"),
        ("Killed\n\n", "Killed"),
        ("", "it said nothing"),
    ],
)
def test_the_error_of_an_engine_is_its_own_and_names_no_machine(log, said):
    assert cells.reason(log).startswith(said)
    assert len(cells.reason("ValueError: " + "x" * 999)) == 300


def test_what_a_library_says_of_its_leaks_is_left_out():
    log = (
        "ValueError: bad size\n"
        "nanobind: leaked 2 functions!\n"
        ' - leaked function "verify"\n'
        " - ... skipped remainder\n"
        "nanobind: this is likely caused by a reference counting issue in the binding code.\n"
        "See https://nanobind.readthedocs.io/en/latest/refleaks.html\n"
        "the end"
    )
    assert cells.without_leaks(log) == "ValueError: bad size\nthe end"


def test_a_model_with_fp8_blocks_fills_a_page_of_k_where_k_and_v_are_apart(tmp_path, monkeypatch):
    def heads(release, feature):
        found = []
        engines = cells.Engines(release, tmp_path, print)
        monkeypatch.setattr(
            engines, "run", lambda wanted, trial, name: found.append(wanted) or {"failed": ""}
        )
        engines.plain(replace(CELL, vllm=release, feature=feature))
        return found[0].kv_heads

    assert heads("0.26.0", "fp8") == 2 * heads("0.27.0", "fp8")
    assert heads("0.26.0", "none") == heads("0.27.0", "fp8")
    assert heads("0.27.0", "fp8 + several ranks") == 2 * heads("0.27.0", "fp8")
    assert heads("0.26.0", "fp8 + several ranks") == cells.HEADS


def test_a_rank_of_a_hybrid_model_has_as_large_a_block_as_one_alone(asked):
    """The device's blocks fill a page of its own, and not all that is asked fits into them."""
    one = replace(CELL, vllm="0.31.0", runner="V1", model="hybrid", feature="none")
    alone, two = asked(one)[1], asked(replace(one, feature="2 ranks"))[1]
    assert block_bytes(two) == 2 * block_bytes(alone)
    assert engine_arguments(two)["num_gpu_blocks_override"] == 35


def test_every_feature_of_the_matrix_changes_the_engine(asked):
    every = (*axes.FEATURES, *axes.SETTINGS)
    assert {one.name for one in every} == set(cells.FEATURES)
    for feature in every[1:]:
        if feature.name == "idle":  # it has a load of its own
            continue
        kind = (*feature.models, *feature.each)[0]
        cell = replace(CELL, model=kind, feature=feature.name)
        _, ours, _ = asked(cell)
        without = asked(replace(cell, feature=NONE))[1]
        assert ours != replace(without, asynchronous=ours.asynchronous), feature.name


def test_a_block_is_stored_the_second_time_and_loaded_the_third(asked):
    _, ours, trial = asked(replace(CELL, feature="store threshold"))
    assert [len(one) for one in trial.rounds] == [cells.PROMPTS] * 3
    assert list(trial.again) == [2]
    extra = engine_arguments(ours)["kv_transfer_config"]["kv_connector_extra_config"]
    assert extra["store_threshold"] == 2
    assert "kv_transfer_config" not in engine_arguments(asked(CELL)[0])


def test_states_are_not_preempted_by_loads_beside_them(asked):
    hybrid = replace(CELL, model="hybrid", connector="Simple eager")
    _, _, trial = asked(hybrid)
    each = [list(one) for one in trial.rounds]
    assert each == [[number] for asked in (range(8), range(8), range(12)) for number in asked]
    assert trial.again == range(8, 16)
    _, _, others = asked(replace(hybrid, model="full attention"))
    assert [len(one) for one in others.rounds] == [8, 8, 12]


def test_a_chunk_is_of_two_blocks(asked):
    for connector in ("Offloading", "tiering fs"):
        _, ours, _ = asked(replace(CELL, connector=connector, feature="chunks"))
        extra = engine_arguments(ours)["kv_transfer_config"]["kv_connector_extra_config"]
        assert extra["block_size"] == 2 * engine_arguments(ours)["block_size"]


def test_the_state_of_a_hybrid_prompt_is_behind_a_whole_chunk_and_not_in_the_tier_before_a_disk(
    asked,
):
    """vLLM stores a chunk of states by its last block, and keeps the prompt's last one alone."""
    cell = replace(CELL, vllm="0.33.0", model="hybrid", connector="tiering fs")
    for feature in ("none", "chunks", "fp8"):
        _, ours, trial = asked(replace(cell, feature=feature))
        assert cells.cached_of(ours) % chunk_tokens(ours) == 0
        assert restored_tokens(ours, cells.cached_of(ours)) == cells.cached_of(ours)
        blocks = ours.cpu_blocks * BLOCK // block_tokens(ours)
        of_each = cells.cached_of(ours) // block_tokens(ours) + 1
        assert 0 < blocks < len(trial.again) * of_each


def test_images_alone_tell_the_prompts_of_a_model_that_sees_apart(asked):
    _, ours, trial = asked(replace(CELL, feature="images"))
    first, _ = cells.asked_of(ours, trial)["rounds"]
    assert len({str(one["tokens"]) for one in first}) == 1
    assert len({one["image"] for one in first}) == cells.PROMPTS
    assert IMAGE + len(first[0]["tokens"]) == cells.CACHED + 9


def test_settings_are_in_both_engines(asked):
    for plain_or_ours in (0, 1):
        run = asked(replace(CELL, feature="whole prompts"))[plain_or_ours]
        assert engine_arguments(run)["enable_chunked_prefill"] is False
        assert run.batch >= engine_arguments(run)["max_model_len"]


def test_without_groups_windows_take_the_room_of_full_attention(asked):
    """All layers are in a block then, and no block leaves a window."""
    cell = replace(CELL, model="sliding window", connector="Simple eager")
    grouped = asked(cell)[1]
    whole = asked(replace(cell, feature="no hybrid manager"))[1]
    assert block_bytes(whole) == 2 * block_bytes(grouped)
    assert (grouped.cpu_blocks, whole.cpu_blocks) == (330, 180)


@pytest.mark.parametrize(
    ("checked", "right"),
    [
        ({"stored": 240, "loaded": 240}, True),
        ({"stored": 240, "loaded": 239}, False),
        ({"stored": 240, "loaded": 240, "unverified": 1}, False),
        ({}, False),
    ],
)
def test_without_prefix_cache_loads_are_counted_by_the_audit(asked, checked, right):
    _, ours, trial = asked(replace(CELL, feature="no prefix cache"))
    assert ("KVPATCH_DEBUG", "1") in ours.environment
    answer = {"tokens": [1], "logprobs": [-1.0]}
    result = {
        "rounds": [[answer | {"cached": at}] * cells.PROMPTS for at in (0, cells.CACHED)],
        "checked": [checked],
        "returned": 0,
        "changed": [],
        "patches": ["fence.build", *cells.AUDITS],
        "elastic": True,
        "async": True,
        "runner": "v2",
    }
    told = {"rounds": [[answer | {"cached": 0}] * cells.PROMPTS] * 2, "runner": "v2"}
    record = cells.judge(result, told, trial, ours)
    assert record["right"] is right
    assert record["patches"] == ["fence.build"]  # an audit changes nothing
    assert cells.AUDITS


def test_runner_v1_schedules_the_stages_of_a_pipeline_in_turn(asked):
    for runner, ahead in (("V1", False), ("V2", True)):
        plain, ours, _ = asked(replace(CELL, runner=runner, feature="2 stages"))
        assert (ours.asynchronous, plain.stages, ours.stages) == (ahead, 2, 2)
        assert engine_arguments(ours)["pipeline_parallel_size"] == 2
        _, ours, _ = asked(replace(CELL, runner=runner, feature="2 stages of 2 ranks"))
        assert (ours.asynchronous, ours.workers, ours.stages) == (ahead, 4, 2)


def test_workers_of_several_ranks_are_given_vllms_own_connectors(asked):
    cell = replace(CELL, connector="Multi", model="latent attention")
    assert asked(cell)[1].inside == ("NothingConnector", "OffloadingConnector")
    several = asked(replace(cell, feature="2 ranks"))[1]
    assert several.inside == ("OffloadingConnector",)
    assert several.ranks == 2


ENGINES = replace(CELL, feature="2 engines")


def test_engines_in_processes_of_their_own_have_vllms_connectors_and_the_audit(asked):
    _, ours, _ = asked(replace(ENGINES, connector="Multi"))
    assert ours.inside == ("OffloadingConnector",)
    assert ("KVPATCH_DEBUG", "1") in ours.environment
    assert engine_arguments(ours)["data_parallel_size"] == 2
    assert "data_parallel_size" not in engine_arguments(asked(CELL)[1])
    for runner, ahead in (("V1", False), ("V2", True)):
        assert asked(replace(ENGINES, runner=runner))[1].asynchronous is ahead


def test_each_engine_is_asked_as_much_as_one_is_and_then_what_another_one_knows(asked):
    _, ours, trial = asked(ENGINES)
    alone = cells.asked_of(asked(CELL)[1], trial)
    job = cells.asked_of(ours, trial)
    assert [len(one) for one in job["rounds"]] == [2 * len(one) for one in alone["rounds"]]
    for first, again in zip(*job["rounds"], strict=True):
        assert first == again
    whole = [str(one["tokens"]) for one in job["rounds"][0]]
    assert len(set(whole)) == len(whole)
    assert [one["rank"] for one in job["rounds"][0][:4]] == [0, 1, 0, 1]
    first, second = job["rounds"][0][:2]
    assert job["crossed"] == [first | {"rank": 1}, second | {"rank": 0}]


def of_engines(**changes):
    """What two engines write that were right, or two of plain vLLM's."""
    engines = []
    for rank in range(2):
        rounds = [
            [
                {"tokens": [rank, number], "logprobs": [-1.0], "cached": at}
                for number in range(cells.PROMPTS)
            ]
            for at in (0, cells.CACHED)
        ]
        engine = {
            "rounds": rounds,
            "crossed": [{"tokens": [1 - rank, 0], "logprobs": [-1.0], "cached": 0}],
            "checked": [{"stored": 240, "loaded": 240}],
            "pool": f"chat-dp{rank}",
            "patches": ["fence.build", *cells.AUDITS],
            "elastic": True,
            "async": True,
            "runner": "v2",
        }
        engines.append(engine)
    engines[1] |= changes
    return engines


PLAIN_ENGINES = [
    {"rounds": [[one | {"cached": 0} for one in of["rounds"][0]]] * 2, "runner": "v2"}
    for of in of_engines()
]


def test_engines_that_were_right_are_counted_together(asked):
    _, ours, trial = asked(ENGINES)
    found = cells.judge_each({"engines": of_engines()}, {"engines": PLAIN_ENGINES}, trial, ours)
    assert found["right"]
    assert (found["answers"], found["blocks_restored"]) == (4 * cells.PROMPTS, 480)
    assert found["tokens_from_tier"] == 2 * cells.PROMPTS * cells.CACHED
    assert (found["scheduling"], found["patches"]) == ("asynchronous", ["fence.build"])
    assert found["widest_logprob_gap"] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"pool": "chat-dp0"},  # the name of the other one
        {"elastic": False},
        {"checked": [{"stored": 240, "loaded": 239}]},
        {"checked": [{"stored": 240, "loaded": 240, "unverified": 1}]},
        {"crossed": [{"tokens": [0, 0], "logprobs": [-1.0], "cached": 640}]},  # of another's tier
        {"crossed": [{"tokens": [1, 0], "logprobs": [-1.0], "cached": 0}]},  # another prompt's
        {"rounds": of_engines()[0]["rounds"]},  # the other engine's answers
        {"async": False},
    ],
)
def test_one_engine_that_was_wrong_is_enough(asked, changes):
    _, ours, trial = asked(ENGINES)
    engines = {"engines": of_engines(**changes)}
    assert not cells.judge_each(engines, {"engines": PLAIN_ENGINES}, trial, ours)["right"]


def test_on_a_disk_an_engine_finds_what_another_one_wrote(asked):
    _, ours, _ = asked(replace(ENGINES, connector="tiering fs"))
    trial = cells.TRIALS["Offloading"]
    crossed = [{"tokens": [0, 0], "logprobs": [-1.0], "cached": 640}]
    theirs = 640 // cells.block_tokens(ours)  # blocks that the one that loads them cannot name
    for unverified, right in ((0, True), (theirs, True), (theirs + 1, False)):
        checked = [{"loaded": 240, "unverified": unverified, "named": 240}]
        engines = {"engines": of_engines(crossed=crossed, checked=checked)}
        found = cells.judge_each(engines, {"engines": PLAIN_ENGINES}, trial, ours)
        assert found["right"] is right
    checked = [{"loaded": 240, "unverified": theirs, "named": 240}]
    of_one = of_engines(checked=checked)  # which found nothing of the other one's
    assert not cells.judge_each({"engines": of_one}, {"engines": PLAIN_ENGINES}, trial, ours)[
        "right"
    ]


def test_engines_that_did_not_get_there_say_why(asked):
    _, ours, trial = asked(ENGINES)
    found = cells.judge_each({"failed": "one\ntwo"}, {"engines": PLAIN_ENGINES}, trial, ours)
    assert found == {"right": False, "why": "kvpatch failed: two"}


def test_a_pair_has_what_each_of_the_two_has(asked):
    for cell in axes.tried_cells("0.33.0"):
        _, ours, _ = asked(cell)
        assert ours.forced == UNTIL_IT_RAN
        for name in axes.settings_of(cell):
            alone = asked(replace(cell, feature=name))[1]
            assert {*alone.settings, *alone.extra} <= {
                *ours.settings,
                *ours.extra,
            } or name == "chunks"
            assert (alone.events, alone.policy) <= (ours.events, ours.policy) or name != "arc"
            for value in ("speculation", "ranks", "stages", "cache_dtype"):
                plain = getattr(Run(), value)
                assert getattr(alone, value) in (plain, getattr(ours, value))
            variables = {variable for variable, _ in alone.environment}
            assert variables <= {variable for variable, _ in ours.environment}


def test_plain_vllm_runs_once_for_what_it_has_nothing_of(asked):
    for name in ("chunks", "host pool", "arc", "KV events", "first limit"):
        assert asked(replace(CELL, feature=name))[0] == asked(CELL)[0]
    both = asked(replace(CELL, feature=admitted.together("chunks", "fp8")))[0]
    assert both == asked(replace(CELL, feature="fp8"))[0]


def test_chunks_of_a_pair_have_two_blocks_of_its_own(asked):
    ours = asked(replace(CELL, feature=admitted.together("chunks", "fp8")))[1]
    assert dict(ours.extra)["block_size"] == 2 * block_tokens(ours) == 256


def test_experts_of_latent_attention_are_a_model_of_both(asked):
    experts_of = replace(CELL, vllm="0.33.0", runner="V2", feature="experts")
    for model, kind in (("full attention", "experts"), ("latent attention", "latent experts")):
        plain, ours, _ = asked(replace(experts_of, model=model))
        assert ours.ranks == plain.ranks == 2
        assert {runs.weights_name(plain), runs.weights_name(ours)} == {kind}
