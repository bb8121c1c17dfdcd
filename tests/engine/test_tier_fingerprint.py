"""What makes the bytes of a block has a part in the name of a tier's folder; without an engine."""

import itertools
import json
import math
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from kvpatch import state
from kvpatch.patches.offloading.registration import Rows
from kvpatch.patches.secondary_tiers import fingerprint, samples
from kvpatch.patches.secondary_tiers.samples import Samples, diagonals

sample = fingerprint.sample_weights


class Model(torch.nn.Module):
    """Every kind of tensor that a model has."""

    def __init__(self, theta=1e4, packed=False):
        super().__init__()
        torch.manual_seed(0)
        self.wide = torch.nn.Linear(300, 200)
        self.norm = torch.nn.Parameter(torch.ones(64))
        self.sinks = torch.nn.Parameter(torch.zeros(8))
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.experts = torch.nn.Parameter(torch.randn(128, 24, 40))
        self.stack = torch.nn.Parameter(torch.randn(2, 16, 24, 40))
        self.turned = torch.nn.Parameter(torch.randn(300, 200).t())
        self.embedding = torch.nn.Embedding(5000, 48)
        self.quantized = torch.nn.Parameter(
            torch.randint(0, 255, (300, 128), dtype=torch.uint8), requires_grad=False
        )
        inverse = 1.0 / theta ** (torch.arange(0, 64, 2) / 64)
        cosines = torch.outer(torch.arange(4096.0), inverse).cos()
        self.register_buffer("cos_sin_cache", cosines, persistent=False)
        self.register_buffer("_k_scale", torch.tensor(1.0))
        if packed:
            self.wide.input_size_per_partition = 300
            weight = self.wide.weight.detach()
            self.wide.cpu_linear = lambda x, empty, bias: torch.nn.functional.linear(x, weight)
            self.wide.weight = torch.nn.Parameter(torch.empty(0))
            self.packed = [weight]  # the library's, of which the model knows nothing


def changed(name, place, packed=False):
    """The digest after some values of one tensor changed."""
    model = Model(packed=packed)
    with torch.no_grad():
        tensor = model.packed[0] if packed else model.get_parameter(name)
        values = tensor[place]
        tensor[place] = values + 1
    return sample(model)


def test_the_digest_is_that_of_the_values_and_not_of_their_place():
    assert sample(Model()) == sample(Model())
    assert sample(Model()) != sample(Model().bfloat16())


def test_rope_is_in_a_buffer_that_is_not_saved():
    assert sample(Model(theta=1e6)) != sample(Model())
    model = Model()
    model._k_scale.fill_(2.0)
    assert sample(model) != sample(Model())


# What may be the only difference: of a vector, a scalar, experts, a stack of stacks, matrices.
PLACES = {
    "norm": [0, 3, 7],
    "sinks": [0, 3, 7],
    "wide.bias": [0, 3, 7],
    "scale": [()],
    "experts": range(0, 128, 7),
    "stack": [(0, 0), (0, 15), (1, 3), (1, 15)],
    "wide.weight": [0, 1, 57, 199],
    "turned": [0, 1, 57, 199],
    "embedding.weight": [0, 1, 57, 199],
    "quantized": [slice(100, 103)],
}


@pytest.mark.parametrize(
    ("name", "place"), [(name, place) for name, places in PLACES.items() for place in places]
)
def test_every_value_counts(name, place):
    assert changed(name, place) != sample(Model())


def digest(tensor, name="a"):
    made = Samples()
    made.add(name, tensor)
    return made.digest()


def test_a_tensor_of_another_name_dtype_or_shape_is_another():
    zeros = torch.zeros(8, 4)
    assert digest(zeros) == digest(torch.zeros(8, 4))
    others = [digest(one) for one in (zeros.view(4, 8), zeros.int(), zeros[:0])]
    assert len({digest(zeros), digest(zeros, "b"), *others}) == 5


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.float8_e4m3fn,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.float64,
        torch.complex64,
    ],
    ids=str,
)
def test_every_dtype_is_read(dtype):
    assert digest(torch.zeros(300, 100).to(dtype)) != digest(torch.ones(300, 100).to(dtype))


def test_few_transfers_for_many_tensors(monkeypatch):
    transfers = []
    joined = torch.cat

    def counted(tensors):
        transfers.append(len(tensors))
        return joined(tensors)

    monkeypatch.setattr(torch, "cat", counted)
    first = sample(Model())
    assert len(transfers) <= 3  # one for each size of a value, of a device
    monkeypatch.setattr(samples, "_BATCH", 1)
    assert sample(Model()) != first  # one for each tensor: the limit is respected
    assert len(transfers) > 10


def test_large_tensors_are_sampled_in_every_few_rows():
    large = torch.zeros(3 * samples.ROWS // 2, 64)
    taken = diagonals(large)
    assert sum(map(len, taken)) < large.numel() // 10
    rows = torch.arange(4 * samples.ROWS).view(-1, 1).expand(-1, 64).contiguous()
    came = sorted({-1, len(rows), *torch.cat(diagonals(rows)).tolist()})
    assert max(after - before for before, after in itertools.pairwise(came)) <= 5
    assert len(came) > 0.6 * len(rows)
    stack = torch.arange(4 * samples.ROWS).view(-1, 1, 1).expand(-1, 1, 8).contiguous()
    for values in diagonals(stack):  # more matrices than rows count otherwise
        assert len(set(values.tolist())) > 0.8 * len(stack)
    assert len(set(torch.cat(diagonals(stack)).tolist())) == len(stack)


def numbered(*shape, dtype=torch.int32):
    """A tensor in which every value is its place in the memory."""
    return torch.arange(math.prod(shape)).view(shape).to(dtype)


def test_the_same_values_count_in_every_release_of_kvpatch():
    """Else nobody finds his blocks again after an update: change this digest with a reason only."""
    tensors = {
        "scalar": numbered(1).view(()),
        "none": numbered(0, 4),
        "vector": numbered(300),
        "whole": numbered(128, 128),
        "matrix": numbered(129, 128, dtype=torch.float32),
        "wide": numbered(3, 9000, dtype=torch.int64),
        "column": numbered(20_000, 1),
        "column of matrices": numbered(20_000, 1, 1, dtype=torch.int16),
        "tall": numbered(60_000, 6),
        "tall of bytes": numbered(60_000, 5, dtype=torch.uint8),
        "stack": numbered(20_000, 2, 8, dtype=torch.float32),
        "stack of stacks": numbered(3, 5, 24, 60),
        "turned": numbered(300, 200).t(),
        "cut": numbered(300, 20, 20)[:, :, ::2],
        "cut and turned": numbered(20, 300, 20).permute(2, 0, 1)[:, :, ::2],
        "complex": torch.view_as_complex(numbered(40, 30, 2, dtype=torch.float32)),
    }
    made = Samples()
    for name, tensor in tensors.items():
        made.add(name, tensor)
    assert made.digest() == "f85e4e21ea6089415f8f0b3740465979b72c1b37c5e498bfe6a4e98dfa79ee2c"


def test_a_batch_is_transferred_once_it_is_full(monkeypatch):
    """The device's memory for what is joined, and the host's, are bounded."""
    transfers = []
    monkeypatch.setattr(
        torch, "cat", lambda parts: transfers.append(len(parts)) or torch.hstack(parts)
    )

    def after(limit, *values):
        transfers.clear()
        monkeypatch.setattr(samples, "_BATCH", limit)
        made = Samples()
        for number in values:
            made.add("a", torch.zeros(number, dtype=torch.float32))
        found = list(transfers)
        made.digest()
        return found

    assert after(64, 8, 8, 8, 7) == [2]  # 64 bytes
    assert after(65, 8, 8) == []
    assert after(64, 8, 8, 8, 8) == [2, 2]


def test_values_of_two_devices_or_sizes_are_not_joined(monkeypatch):
    class Values:
        is_meta, dtype, shape = False, "x", (1,)

        def __init__(self, device, size):
            self.device, self.element_size = device, lambda: size

        def numel(self):
            return 1

        def detach(self):
            return self

    joined = []
    monkeypatch.setattr(samples, "diagonals", lambda tensor: [tensor])
    monkeypatch.setattr(
        Samples, "_transfer", lambda self, key: joined.append(self._batches.pop(key))
    )
    tensors = [Values("cuda:0", 2), Values("cuda:1", 2), Values("cuda:0", 4), Values("cuda:0", 2)]
    made = Samples()
    for tensor in tensors:
        made.add("a", tensor)
    made.digest()
    assert sorted(map(len, joined)) == [1, 1, 2]
    assert [tensors[0], tensors[3]] in joined


def test_tensors_without_values_are_named():
    assert digest(torch.empty(2, 3, device="meta")) != Samples().digest()


@pytest.mark.parametrize("row", [0, 77, 199])
def test_weights_that_a_library_has_packed_count(row):
    """vLLM's CPU backend drops the tensor of a linear layer after packing it."""
    assert sample(Model(packed=True)) == sample(Model(packed=True))
    assert changed("", row, packed=True) != sample(Model(packed=True))


# The configuration


def configured(**changes):
    """A ``VllmConfig`` of vLLM, as far as it is read, of a model with a setting changed."""
    config = LlamaConfig(num_hidden_layers=1, vocab_size=8, **changes)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=config, hf_text_config=config, dtype=torch.float16),
        cache_config=SimpleNamespace(),
    )


def named(config):
    return json.dumps(fingerprint.configuration(config), sort_keys=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 1e-3},
        {"rope_theta": 1e6},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"sliding_window": 128},
        {"attention_multiplier": 0.1},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_every_setting_of_a_model_counts(changes):
    assert named(configured()) == named(configured())
    assert named(configured(**changes)) != named(configured())


def test_where_a_model_was_read_from_does_not_count():
    changed = configured()
    changed.model_config.hf_config._name_or_path = "/another/folder"
    assert named(changed) == named(configured())


def test_values_of_libraries_are_plain_and_the_same_in_every_process():
    assert fingerprint.plain(torch.float16) == "torch.float16"
    assert "0x" not in json.dumps(fingerprint.plain(LlamaConfig()))


# The descriptions of workers


class Worker:
    """A worker of vLLM with two layers in one region, and its KV connector."""

    def __init__(self, offset=0, dtype=torch.float16):
        memory = torch.zeros(4, 64, dtype=dtype)
        half = 32
        caches = {"a": memory[:, :half], "b": memory[:, half:]}
        if offset:
            caches = {"a": caches["b"], "b": caches["a"]}
        layers = {name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()}
        group = SimpleNamespace(layer_names=["a", "b"])
        self.device = torch.device("cpu")
        self.model_runner = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context=layers),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
            vllm_config=configured(),
            model=Model(),
        )
        self.connector = SimpleNamespace(connector_worker=SimpleNamespace())
        row = memory.shape[1] * memory.element_size()
        state.attach(self.connector.connector_worker, Rows([(memory.data_ptr(), row)]))

    def describe(self, monkeypatch):
        from vllm.distributed import kv_transfer

        monkeypatch.setattr(kv_transfer, "get_kv_transfer_group", lambda: self.connector)
        return fingerprint.describe(self)


def test_a_worker_describes_all_of_it(monkeypatch):
    import vllm
    from vllm.platforms import current_platform

    described = Worker().describe(monkeypatch)
    assert described == Worker().describe(monkeypatch)
    json.dumps(described)
    assert described["rows"] == [128]
    assert [layer[:4] for layer in described["layers"][0]] == [
        ["a", "torch.float16", 0, 0],
        ["b", "torch.float16", 0, 64],
    ]
    assert Worker(offset=1).describe(monkeypatch)["layers"] != described["layers"]
    assert Worker(dtype=torch.bfloat16).describe(monkeypatch)["layers"] != described["layers"]
    assert described["weights"] == sample(Model())
    assert described["vllm"] == vllm.__version__
    assert current_platform.device_name in described["platform"]
