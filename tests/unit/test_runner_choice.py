"""The runner where kvcached has no adapter for V2: V1, unless V2 was asked for or is needed."""

import importlib
import logging
import multiprocessing
import sys
from types import SimpleNamespace

import pytest
import wrapt
from fakes import facts, module
from packaging.version import Version

from kvpatch import patches, rules, supported
from kvpatch.patches.kvcached_adapters import runner_choice
from kvpatch.patches.kvcached_adapters.rules import RULES

RELEASES = [release for release in supported.RELEASES if Version(release) >= Version("0.16")]
LINE = (
    "kvpatch: Model Runner V1 is used where vLLM would use V2 by default, because kvcached has no "
    "adapter for V2 before vLLM 0.28; set VLLM_USE_V2_MODEL_RUNNER=0 to choose V1 yourself"
)


class Config:
    """A ``VllmConfig``, which decides in vLLM's order: asked for, needed, default of the model."""

    kv_transfer_config = None
    cache_config = SimpleNamespace()

    def __init__(self, *architectures, asked=None, diffusion=False):
        self.asked = asked
        self.model_config = SimpleNamespace(
            architectures=list(architectures), is_diffusion=diffusion, is_hybrid=False
        )

    @property
    def use_v2_model_runner(self):
        if self.asked is not None:
            return self.asked
        if self.model_config.is_diffusion:
            return True
        if not self._is_default_v2_model_runner_model():
            return False
        return bool(sys.modules["vllm.triton_utils"].HAS_TRITON)

    def _is_default_v2_model_runner_model(self):
        return "MixtralForCausalLM" not in self.model_config.architectures


def rows(release):
    return [
        row
        for feature in patches.FEATURES
        if Version(release) in feature.span
        for row in feature.at(Version(release))
        if row.target.endswith("._is_default_v2_model_runner_model")
    ]


@pytest.fixture
def gpu(monkeypatch):
    """vLLM as on a GPU: Triton is there."""
    monkeypatch.setattr(runner_choice, "_said_by", 0)
    return module(monkeypatch, "vllm.triton_utils", HAS_TRITON=True)


@pytest.fixture
def patched(gpu, monkeypatch):
    apply(monkeypatch, "0.26.0")


def apply(monkeypatch, release):
    for row in rows(release):
        name = row.target.rpartition(".")[2]
        wrapper = getattr(runner_choice, row.wrapper.partition(":")[2])
        monkeypatch.setattr(Config, name, wrapt.FunctionWrapper(vars(Config)[name], wrapper))


def refused(made, release="0.26.0", environment=None):
    refusal = rules.check(made, facts(release, environment=environment), RULES)
    return refusal.code if refusal else ""


@pytest.mark.parametrize("release", RELEASES)
def test_v1_is_chosen_where_kvcached_has_no_adapter_and_only_there(release, gpu, monkeypatch):
    apply(monkeypatch, release)
    made = Config("LlamaForCausalLM")
    v2_by_default = Version("0.22") <= Version(release)
    has_adapter = Version("0.28") <= Version(release)
    assert made.use_v2_model_runner is (has_adapter or not v2_by_default)
    if v2_by_default:
        assert refused(made, release) == ""


def test_it_is_said_once_in_the_process_that_the_operator_started(patched, caplog, monkeypatch):
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    with caplog.at_level(logging.DEBUG, "vllm.kvpatch"):
        for _ in range(2):
            assert Config("Qwen3ForCausalLM").use_v2_model_runner is False
        assert [(one.levelname, one.getMessage()) for one in caplog.records] == [("WARNING", LINE)]
        monkeypatch.setattr(runner_choice, "_said_by", 0)
        monkeypatch.setattr(multiprocessing, "parent_process", lambda: "the frontend")
        assert Config("Qwen3ForCausalLM").use_v2_model_runner is False
        assert [one.levelname for one in caplog.records] == ["WARNING", "DEBUG"]


def test_it_is_said_by_the_first_process_of_a_container_too(caplog, monkeypatch):
    monkeypatch.setattr(runner_choice.__name__, runner_choice)  # what it is again afterwards
    monkeypatch.delitem(sys.modules, runner_choice.__name__)
    fresh = importlib.import_module(runner_choice.__name__)
    monkeypatch.setattr(fresh.os, "getpid", lambda: 1)
    with caplog.at_level(logging.DEBUG, "vllm.kvpatch"):
        fresh._say()
    assert [one.getMessage() for one in caplog.records] == [LINE]


def test_a_model_without_a_name_is_as_any_other(patched):
    made = Config()
    made.model_config.architectures = None
    assert runner_choice.v1_by_default(lambda: True, made, (), {}) is False


def test_without_triton_vllm_chooses_v1_and_says_why(patched, gpu, caplog):
    gpu.HAS_TRITON = False
    made = Config("LlamaForCausalLM")
    assert made._is_default_v2_model_runner_model() is True
    assert made.use_v2_model_runner is False
    assert not caplog.records


@pytest.mark.parametrize(
    "made",
    [
        Config("LlamaForCausalLM", asked=True),
        Config("DiffusionGemmaForCausalLM", diffusion=True),
        Config("InklingForCausalLM"),
        Config("InklingForConditionalGeneration"),
        Config("KimiK3ForConditionalGeneration"),
        Config("LongcatFlashNgramForCausalLM"),
    ],
    ids=lambda made: made.model_config.architectures[0],
)
def test_v2_that_was_asked_for_or_is_needed_stays_and_is_refused(made, patched, caplog):
    assert made.use_v2_model_runner is True
    assert refused(made) == "KVP326"
    assert not caplog.records


def test_v1_that_was_asked_for_or_is_vllms_is_not_announced(patched, caplog):
    for made in (Config("LlamaForCausalLM", asked=False), Config("MixtralForCausalLM")):
        assert made.use_v2_model_runner is False
    assert not caplog.records
