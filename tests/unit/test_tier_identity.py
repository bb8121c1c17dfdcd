"""What of a configuration and a model a tier's files are named after; without torch.

The same with tensors and transformers' configurations: tests/engine/test_tier_fingerprint.py.
"""

import dataclasses
import enum
import json
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import module

from kvpatch import state
from kvpatch.patches.secondary_tiers import fingerprint
from kvpatch.patches.secondary_tiers.fingerprint import plain
from kvpatch.patches.secondary_tiers.weights import Weights
from kvpatch.refusal import Refusal

MODEL = (
    "architecture",
    "dtype",
    "quantization",
    "max_model_len",
    "disable_sliding_window",
    "model_impl",
)
MULTIMODAL = ("mm_processor_kwargs", "media_io_kwargs")
CACHE = ("cache_dtype", "calculate_kv_scales", "sliding_window", "kv_cache_dtype_skip_layers")
LAYER = ("_k_scale_float", "_v_scale_float", "kv_cache_dtype")
IMPLEMENTATION = ("scale", "sliding_window", "logits_soft_cap", "num_kv_heads", "head_size")


def has(*names):
    """Return an object whose values are their names."""
    return SimpleNamespace(**{name: f"the {name}" for name in names})


def said(*names):
    return {name: f"the {name}" for name in names}


def configured(**more):
    model = has("hf_config", "hf_text_config", *MODEL)
    model.multimodal_config = has(*MULTIMODAL)
    return SimpleNamespace(
        model_config=model,
        cache_config=has(*CACHE, "gpu_memory_utilization"),
        attention_config="the attention",
        quant_config="the quantization of a checkpoint",
        **more,
    )


def test_a_configuration_is_all_that_makes_the_bytes_of_a_block():
    assert fingerprint.configuration(configured()) == {
        "model": "the hf_config",
        "text": "the hf_text_config",
        "options": said(*MODEL, *MULTIMODAL),
        "cache": said(*CACHE),
        "attention": "the attention",
        "quantization": "the quantization of a checkpoint",
    }


def test_options_of_the_model_itself_and_those_that_no_release_has():
    made = configured()
    made.model_config.mm_processor_kwargs = "the model's own"  # before vLLM 0.20
    del made.model_config.model_impl, made.attention_config, made.quant_config
    options = fingerprint.configuration(made)["options"]
    assert options["mm_processor_kwargs"] == "the model's own"
    assert options["model_impl"] is None
    assert fingerprint.configuration(made)["attention"] is None
    assert fingerprint.configuration(made)["quantization"] is None


def test_an_attention_layer_is_its_classes_and_scales():
    layer = has(*LAYER, "layer_name")
    layer.impl = has(*IMPLEMENTATION)
    assert fingerprint.attention(layer) == {
        "class": "types.SimpleNamespace",
        "implementation": "types.SimpleNamespace",
        **said(*LAYER, *IMPLEMENTATION),
    }
    layer.impl = 7
    assert fingerprint.attention(layer)["implementation"] == 7


class Mode(enum.Enum):
    FIRST = object()


class Name(str, enum.Enum):
    AUTO = "auto"


class Level(enum.IntEnum):
    TWO = 2


@dataclasses.dataclass
class Pair:
    a: Any
    b: Any


class Configuration:
    """As of transformers: what its class does not know is an attribute only."""

    def __init__(self, **known):
        self._known = known
        self._name_or_path = "/a/folder"
        self.added = {"scale": 0.1}

    def to_dict(self):
        return self._known


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (0.5, 0.5),
        ("auto", "auto"),
        (Name.AUTO, "auto"),
        (Level.TWO, 2),
        (Mode.FIRST, "FIRST"),
        ({1: Mode.FIRST, "b": {"c": None}}, {"1": "FIRST", "b": {"c": None}}),
        ([Mode.FIRST, (1, 2)], ["FIRST", [1, 2]]),
        ((1, "a"), [1, "a"]),
        ({"b", "a"}, ['"a"', '"b"']),
        (frozenset({3, 2, 1}), ["1", "2", "3"]),
        (frozenset({Pair}), [json.dumps(f"{__name__}.Pair")]),
        (int, "builtins.int"),
        (object(), "builtins.object"),
        (Pair(1, [Mode.FIRST]), {"a": 1, "b": ["FIRST"]}),
        (Pair, f"{__name__}.Pair"),
        (
            Configuration(eps=1e-5, _commit_hash="an older one"),
            {"class": f"{__name__}.Configuration", "eps": 1e-5, "added": {"scale": 0.1}},
        ),
        (Configuration, f"{__name__}.Configuration"),
    ],
)
def test_values_are_plain(value, expected):
    made = plain(value)
    assert made == expected
    assert type(made) is type(expected)
    json.dumps(made)


def test_the_members_of_a_set_are_sorted_inside_too():
    class Frozen(dict):
        def __hash__(self):
            return 0

    one, other = Frozen(a=1, b=2), Frozen(b=2, a=1)
    assert plain({one}) == plain({other}) == ['{"a": 1, "b": 2}']


def test_a_dtype_is_its_name():
    dtype = type("dtype", (), {"__module__": "torch", "__repr__": lambda self: "torch.float16"})
    assert plain(dtype()) == "torch.float16"


def test_descriptions_have_no_order_but_that_of_the_ranks():
    def digest(*descriptions):
        return fingerprint._digest(SimpleNamespace(collective_rpc=lambda call: descriptions))

    one, same, other = {"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"d": 3, "c": 2}, "a": 1}, {"a": 1}
    assert digest(one, other) == digest(same, other) != digest(other, one)


class Mapper:
    """vLLM's ``FileMapper``."""

    rank = 3
    base_path = ""

    def __init__(self):
        self.fields = {"model": "m"}

    def _compute_base_path(self, root, fields):
        return f"{root}/{'-'.join(map(str, fields.values()))}"


def mapper(root):
    def make(root_dir, spec, parallel_agnostic=True):
        assert (root_dir, spec, parallel_agnostic) == (str(root), "spec", False)
        return Mapper()

    return fingerprint.around_file_mapper(make, None, (str(root),), {"spec": "spec"})


@pytest.fixture
def weights(monkeypatch):
    made = Weights(lambda: "new", "old")
    monkeypatch.setattr(fingerprint, "_described", "old")
    monkeypatch.setattr(fingerprint, "_weights", made)
    return made


def test_a_tiers_folders_are_named_after_all_of_it_and_the_user(weights, tmp_path):
    made = mapper(tmp_path)
    user = os.geteuid()
    assert made.fields == {"model": "m", "kvpatch_memory": "old", "kvpatch_user": user}
    assert made.base_path == f"{tmp_path}/m-old-{user}"
    assert {(one.name, one.stat().st_mode & 0o777) for one in tmp_path.iterdir()} == {
        (f"m-old-{user}", 0o700),
        (f"m-old-{user}_r3", 0o700),
    }
    assert state.find(made, Weights) is weights
    (rename,) = weights.renamed
    rename("new")
    assert made.base_path == f"{tmp_path}/m-new-{user}"
    assert {one.name for one in tmp_path.iterdir()} >= {f"m-new-{user}", f"m-new-{user}_r3"}


def test_a_tier_without_an_engine_is_refused_and_one_without_weights_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr(fingerprint, "_described", None)
    monkeypatch.setattr(fingerprint, "_weights", None)
    with pytest.raises(Refusal, match="KVP412"):
        mapper(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(fingerprint, "_described", "old")
    assert state.find(mapper(tmp_path), Weights) is None


def test_names_of_objects_in_a_store_are_those_of_no_folders(weights, tmp_path):
    with fingerprint.without_folders():
        made = mapper(tmp_path)
    assert made.fields["kvpatch_memory"] == "old"
    assert list(tmp_path.iterdir()) == []
    mapper(tmp_path)
    assert list(tmp_path.iterdir()) != []


def test_a_folder_that_others_can_open_is_refused(weights, tmp_path):
    (tmp_path / f"m-old-{os.geteuid()}").mkdir(mode=0o777)
    (tmp_path / f"m-old-{os.geteuid()}").chmod(0o777)
    with pytest.raises(Refusal, match="a secondary tier cannot be used") as refused:
        mapper(tmp_path)
    assert refused.value.code == "KVP334"
    assert isinstance(refused.value.__cause__, OSError)


class Recorder:
    """In the place of ``Samples``: what was added, in its order."""

    def __init__(self):
        self.added = []

    def add(self, name, tensor):
        self.added.append((name, tensor))

    def digest(self):
        return self.added


class Weight:
    dtype = "bfloat16"

    def __init__(self, values):
        self.values = values

    def numel(self):
        return self.values


class Linear:
    """A layer whose weights a library has packed, if there are none left in ``weight``."""

    input_size = 48

    def __init__(self, left, **more):
        self.weight = Weight(left)
        vars(self).update(more)

    def cpu_linear(self, given, weight, bias):
        assert (weight, bias) == (self.weight, None)
        return ("answer to", given)


@pytest.fixture
def torch(monkeypatch):
    class Random:
        def __init__(self, size, generator):
            self.made = (size, generator)

        def to(self, dtype):
            return (*self.made, dtype)

    class Generator:
        def manual_seed(self, seed):
            return f"seed {seed}"

    def randn(*size, generator):
        return Random(size, generator)

    of_torch = {"Generator": Generator, "randn": randn, "inference_mode": nullcontext}
    module(monkeypatch, "torch", **of_torch)
    monkeypatch.setattr(fingerprint, "Samples", Recorder)


def test_every_parameter_buffer_and_packed_layer_counts(torch):
    packed = {
        "rank": Linear(0, input_size_per_partition=24),
        "whole": Linear(0),
        "kept": Linear(5),
        "other": SimpleNamespace(weight=Weight(0)),
        "none": SimpleNamespace(cpu_linear=None, weight=Weight(0)),
        "last": Linear(0),
    }
    model = SimpleNamespace(
        named_parameters=lambda: iter([("w.2", "w2"), ("w.1", "w1")]),
        named_buffers=lambda: iter([("rope", "cosines"), ("v", "scale")]),
        named_modules=lambda: iter(packed.items()),
    )

    def answer(size):
        return ("answer to", ((1, size), "seed 0", "bfloat16"))

    assert fingerprint.sample_weights(model) == [
        ("rope", "cosines"),
        ("v", "scale"),
        ("w.1", "w1"),
        ("w.2", "w2"),
        ("rank packed", answer(24)),
        ("whole packed", answer(48)),
        ("last packed", answer(48)),
    ]
