"""vLLM's recipes: what they are resolved to, and what the rules say of them.

That the page and the shares in README.md are current is in test_docs.py.
"""

import sys

import pytest

from harness.recipes import deployments, table
from harness.recipes.configurations import DATA, EXPERTS, Recipe, Recipes
from kvpatch import admitted
from kvpatch.patches.offloading import place

LLAMA = Recipe("meta-llama/Llama-3.3-70B-Instruct", "default", "offloading_cpu")


@pytest.fixture(scope="module")
def recipes():
    return Recipes()


def test_a_recipe_is_resolved_to_what_vllm_would_read(recipes):
    config = recipes.configuration(LLAMA, "0.33.0")
    assert config.kv_transfer_config.kv_connector_extra_config["blocks_per_chunk"] == 4
    assert config.parallel_config.world_size == recipes.ranks(LLAMA) == 2
    assert config.cache_config.cache_dtype == "auto"
    fp8 = recipes.configuration(LLAMA._replace(variant="fp8"), "0.33.0")
    assert fp8.cache_config.cache_dtype == "fp8"
    glm = Recipe("zai-org/GLM-4.5", "fp8", "offloading_fs", DATA)
    spread = recipes.configuration(glm, "0.33.0").parallel_config
    assert (spread.data_parallel_size, spread.world_size) == (8, 1)
    assert spread.enable_expert_parallel
    drafting = Recipe("baidu/ERNIE-4.5-21B-A3B-PT", "default", "simple", draft="ernie_mtp")
    assert recipes.configuration(drafting, "0.33.0").speculative_config.method == "mtp"
    ocr = Recipe("zai-org/Glyph", "default", "simple")
    assert not recipes.configuration(ocr, "0.33.0").cache_config.enable_prefix_caching


def test_each_kind_of_model_has_its_place(recipes):
    kinds = {
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2": place.HYBRID,
        "zai-org/GLM-5.2": place.SPARSE,
        "Qwen/Qwen3-32B": place.FULL,
    }
    for model, kind in kinds.items():
        config = recipes.configuration(Recipe(model, "default", "simple"), "0.33.0")
        assert place.kind_of(config.model_config) == kind


def test_every_recipe_is_asked_with_every_preset_and_variant(recipes):
    asked = list(recipes.plain())
    assert len({one.model for one in asked}) == 46
    assert len(asked) == 3 * 81 == len(set(asked))
    assert all(one.draft for one in recipes.drafting())
    assert {one.strategy for one in recipes.spread(EXPERTS)} == {EXPERTS}


def test_a_refusal_has_its_code_and_its_basis(recipes):
    spread = LLAMA._replace(strategy=DATA)
    config = recipes.configuration(spread, table.newest())
    found = table.ask(config, table.newest())
    assert (found.code, found.basis) == ("KVP374", "not validated")
    assert table.ask_suspended(config, table.newest()) == found
    windows = Recipe("deepseek-ai/DeepSeek-V4-Flash", "default", "simple")
    found = table.ask(recipes.configuration(windows, table.newest()), table.newest())
    assert (found.code, found.basis) == ("KVP393", "incompatible")
    assert table.ask(recipes.configuration(LLAMA, table.newest()), table.newest()).admitted


def test_what_cannot_be_suspended_says_why(recipes, monkeypatch):
    """The engine starts, so that no rule has a code."""
    pair = admitted.together("expert parallelism", "idle")
    ran = {name: found for name, found in admitted.table().items() if name != pair}
    monkeypatch.setattr(admitted, "table", lambda: ran)
    spread = recipes.configuration(Recipe("zai-org/GLM-4.5V", "default", "simple"), table.newest())
    assert table.ask(spread, table.newest()).admitted
    found = table.ask_suspended(spread, table.newest())
    assert (found.code, found.admitted) == ("", False)
    assert found.why == "suspending is not validated with expert parallelism"


def test_a_share_counts_defaults_or_all(recipes):
    right, wrong = table.Answer("", table.ADMITTED), table.Answer("KVP310", "not validated", "x")
    line = table.Line("", {LLAMA: right, LLAMA._replace(variant="fp8"): wrong})
    assert line.shares(["offloading_cpu", "simple"]) == ["1 of 1, 1 of 2", "0 of 0, 0 of 0"]


def test_the_command_prints_every_row(monkeypatch, capsys, recipes):
    monkeypatch.setattr(sys, "argv", ["scripts/recipes", "0.32.0"])
    assert table.main() == 0
    printed = capsys.readouterr().out
    assert all(f"\n{one.model}\t" in f"\n{printed}" for one in recipes.plain())
    assert "KVP374" in printed


def test_what_deployments_turn_on_is_asked_of_the_rules():
    found = {one.name: answer for one, answer in deployments.answers(table.newest())}
    assert len(found) == len(deployments.FEATURES)
    assert found["hybrid models"].admitted
    assert found["LoRA"].code == "KVP332"
    assert found["TP over two machines"].basis == "incompatible"
    assert found["latent attention with an indexer, TP 4"].admitted
    assert found["an fp8 KV cache of latent attention"].code == "KVP310"
