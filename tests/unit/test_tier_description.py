"""What the files of a secondary tier are named after: all ranks, weights and layers."""

import gc
import weakref
from types import SimpleNamespace

import pytest
from fakes import module, transfer
from test_tier_identity import mapper

from kvpatch import state
from kvpatch.patches.offloading.registration import Rows
from kvpatch.patches.secondary_tiers import fingerprint, shared_memory
from kvpatch.patches.secondary_tiers.weights import Weights


class Cache:
    """A KV cache tensor of float32: 8 blocks of 2 heads, 4 tokens and 3 channels."""

    dtype = "torch.float32"

    def __init__(self, address, stride=(48, 1, 6, 2)):
        self.address, self.strides = address, stride
        self.shape = (8, 2, 4, 3)

    def data_ptr(self):
        return self.address

    def stride(self):
        return self.strides

    def element_size(self):
        return 4


ROWS = [(1000, 192), (5000, 192)]


def layout(**changes):
    given = {
        "kv_caches": {"a": Cache(1000), "b": Cache(1096), "c": Cache(5000)},
        "groups": [["a", "b"], ["c"]],
        "rows": ROWS,
    } | changes
    return fingerprint.block_layout(**given)


def test_a_layout_has_every_layers_place_in_a_block():
    inside = [(2, 4), (4, 24), (3, 8)]  # not the blocks
    assert layout() == {
        "rows": [192, 192],
        "layers": [
            [["a", "torch.float32", 0, 0, inside], ["b", "torch.float32", 0, 96, inside]],
            [["c", "torch.float32", 1, 0, inside]],
        ],
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_caches": {"a": Cache(1096), "b": Cache(1000), "c": Cache(5000)}},
        {"kv_caches": {"a": Cache(1000), "b": Cache(1096), "c": Cache(5000, (48, 24, 6, 2))}},
        {"kv_caches": {"a": Cache(1000), "b": Cache(5000), "c": Cache(1096)}},
        {"groups": [["b", "a"], ["c"]]},
        {"groups": [["a"], ["b", "c"]]},
        {"rows": [(1000, 192), (5000, 384)]},
    ],
    ids=["order in a row", "strides", "regions", "order of layers", "groups", "row size"],
)
def test_another_layout_is_described_otherwise(changes):
    assert layout(**changes) != layout()


def test_a_states_tensors_are_described_each_in_its_place():
    inside = [(2, 4), (4, 24), (3, 8)]
    state_of = {"a": (Cache(1000), Cache(1096)), "b": [Cache(5000)], "c": Cache(5000)}
    assert layout(kv_caches=state_of)["layers"] == [
        [
            ["a", ["torch.float32", 0, 0, inside], ["torch.float32", 0, 96, inside]],
            ["b", ["torch.float32", 1, 0, inside]],
        ],
        [["c", "torch.float32", 1, 0, inside]],
    ]
    swapped = state_of | {"a": (Cache(1096), Cache(1000))}
    assert layout(kv_caches=swapped) != layout(kv_caches=state_of)


def test_a_region_ends_before_its_next_row():
    places = layout(kv_caches={"a": Cache(1191), "b": Cache(5191), "c": Cache(5000)})["layers"]
    assert [layer[2:4] for group in places for layer in group] == [[0, 191], [1, 191], [1, 0]]
    with pytest.raises(StopIteration):
        layout(kv_caches={"a": Cache(1192), "b": Cache(1096), "c": Cache(5000)})


@pytest.fixture
def worker(monkeypatch):
    module(monkeypatch, "vllm", __version__="0.28.0")
    transfer = module(monkeypatch, "vllm.distributed.kv_transfer")
    side = SimpleNamespace()
    state.attach(side, Rows(ROWS))
    parts = [SimpleNamespace(), SimpleNamespace(connector_worker=side)]
    transfer.get_kv_transfer_group = lambda: SimpleNamespace(_connectors=parts)
    monkeypatch.setattr(fingerprint, "_platform", lambda device: f"platform of {device}")
    monkeypatch.setattr(fingerprint, "sample_weights", lambda model: f"weights of {model}")
    for name in ("configuration", "attention"):
        monkeypatch.setattr(fingerprint, name, lambda owner: "chosen", raising=False)
    caches = {"a": Cache(1000), "b": Cache(1096), "c": Cache(5000)}
    groups = [SimpleNamespace(layer_names=names) for names in (["a", "b"], ["c"])]
    return SimpleNamespace(
        device="device",
        model_runner=SimpleNamespace(
            model="model",
            vllm_config=None,
            kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
            compilation_config=SimpleNamespace(
                static_forward_context={
                    name: SimpleNamespace(kv_cache=cache) for name, cache in caches.items()
                }
            ),
        ),
    )


def test_a_worker_describes_its_platform_weights_and_layout(worker):
    """Other weights under the same name would serve their own blocks: wrong tokens."""
    assert fingerprint.describe(worker) == {
        "vllm": "0.28.0",
        "platform": "platform of device",
        "configuration": "chosen",
        "attention": dict.fromkeys("abc", "chosen"),
        "weights": "weights of model",
        **layout(),
    }


STATE = ("mamba_cache_mode", "mamba_block_size", "mamba_cache_dtype", "mamba_ssm_cache_dtype")


@pytest.mark.parametrize("at", "abc")
def test_how_a_state_is_kept_counts_where_there_is_one(worker, at):
    """A mode names other tokens' states by the same hash."""
    caching = SimpleNamespace(**dict.fromkeys(STATE, "as it is"))
    worker.model_runner.vllm_config = SimpleNamespace(cache_config=caching)
    assert "state" not in fingerprint.describe(worker)
    layers = worker.model_runner.compilation_config.static_forward_context
    layers[at].kv_cache = [layers[at].kv_cache]
    for name in STATE:
        setattr(caching, name, "otherwise")
        assert fingerprint.describe(worker)["state"] == vars(caching)


@pytest.mark.parametrize("runner", ["drafter", "speculator"])
def test_what_drafts_counts_as_the_model_does(worker, runner):
    """Its layers have blocks too, of its own weights."""
    drafting = SimpleNamespace(hf_config={"hidden_size": 64}, hf_text_config={}, dtype="bfloat16")
    speculative = SimpleNamespace(
        method="eagle", num_speculative_tokens=3, draft_model_config=drafting
    )
    worker.model_runner.vllm_config = SimpleNamespace(speculative_config=speculative)
    setattr(worker.model_runner, runner, SimpleNamespace(model="drafting model"))
    described = fingerprint.describe(worker)
    assert described["weights"] == "weights of model"
    assert described["drafting weights"] == "weights of drafting model"
    known = described["drafts"]
    assert (known["method"], known["model"], known["options"]["dtype"]) == (
        "eagle",
        {"hidden_size": 64},
        "bfloat16",
    )
    for owner, name, value in (
        (speculative, "method", "draft_model"),
        (speculative, "num_speculative_tokens", 2),
        (speculative, "parallel_drafting", True),
        (drafting, "hf_config", {"hidden_size": 32}),
        (drafting, "hf_text_config", {"hidden_size": 32}),
        (drafting, "dtype", "float16"),
    ):
        setattr(owner, name, value)
        changed = fingerprint.describe(worker)["drafts"]
        assert changed != known
        known = changed


@pytest.mark.parametrize("owner", [{}, {"drafter": SimpleNamespace()}, {"speculator": None}])
def test_what_drafts_without_a_model_has_no_blocks(worker, owner):
    vars(worker.model_runner).update(owner)
    assert not {"drafts", "drafting weights"} & fingerprint.describe(worker).keys()


class Core:
    """An ``EngineCore`` with workers that describe themselves, and map files."""

    def __init__(self, *said, tiers=True):
        extra = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{}] * tiers}
        self.vllm_config = SimpleNamespace(
            kv_transfer_config=transfer("OffloadingConnector", **extra)
        )
        self.asked = []
        self.said = said
        self.files = [{"an id": (1, number)} for number in range(len(said))]
        self.model_executor = SimpleNamespace(collective_rpc=self.rpc)

    def rpc(self, method):
        self.asked.append(method)
        return self.files if method is shared_memory.files else list(self.said)

    def digest(self):
        assert fingerprint.around_kv_caches(lambda *args: args, self, (1,), {}) == (1,)
        return fingerprint._described


@pytest.fixture(autouse=True)
def nothing_described(monkeypatch):
    monkeypatch.setattr(fingerprint, "_described", None)
    monkeypatch.setattr(fingerprint, "_weights", None)
    monkeypatch.setattr(shared_memory, "_of_workers", [])


def test_every_ranks_description_counts():
    one = Core({"weights": "a"}, {"weights": "b"})
    first = one.digest()
    assert one.asked == [shared_memory.files, fingerprint.describe]
    assert first == Core({"weights": "a"}, {"weights": "b"}).digest()
    others = [
        Core({"weights": "a"}).digest(),
        Core({"weights": "a"}, {"weights": "c"}).digest(),
        Core({"weights": "c"}, {"weights": "b"}).digest(),
    ]
    assert first is not None
    assert len({first, *others}) == 4


def test_an_engine_without_tiers_asks_nobody_and_forgets_another_engines_description():
    assert Core({"weights": "a"}).digest() is not None
    assert shared_memory._of_workers == [{"an id": (1, 0)}]  # what the scheduler may map
    without = Core({"weights": "a"}, tiers=False)
    assert without.digest() is None
    assert without.asked == shared_memory._of_workers == []
    assert fingerprint._weights is None


def test_a_description_of_an_engine_that_failed_is_not_the_next_ones():
    assert Core({"weights": "a"}).digest() is not None
    with pytest.raises(ZeroDivisionError):
        fingerprint.around_kv_caches(lambda: 1 / 0, Core(), (), {})
    assert fingerprint._described is None


def test_a_deleted_engine_is_not_kept():
    core = Core({})
    core.digest()
    kept = weakref.ref(core)
    del core
    gc.collect()
    assert kept() is None


def test_replaced_weights_have_a_folder_of_their_own(tmp_path):
    core = Core({"weights": "old"})
    core.digest()
    one = mapper(tmp_path)
    weights = state.find(one, Weights)
    assert weights is state.find(core, Weights) is not None
    old = one.base_path
    assert weights.usable()
    core.said = [{"weights": "new"}]
    weights.touched = True
    weights.reset()
    assert weights.usable()
    assert one.base_path != old
    Core({"weights": "new"}).digest()
    assert mapper(tmp_path).base_path == one.base_path


@pytest.mark.parametrize(("kind", "platform"), [("cpu", "a machine AVX512"), ("cuda", "a machine")])
def test_keys_are_packed_for_the_instruction_set_of_a_cpu(monkeypatch, kind, platform):
    cpu = SimpleNamespace(get_cpu_capability=lambda: "AVX512")
    module(monkeypatch, "torch", backends=SimpleNamespace(cpu=cpu))
    here = SimpleNamespace(device_name="a machine")
    module(monkeypatch, "vllm.platforms", current_platform=here)
    assert fingerprint._platform(SimpleNamespace(type=kind)) == platform


def test_dimensions_of_one_are_no_part_of_a_layout():
    """Their strides are of no use, and differ between equal tensors."""

    class Single(Cache):
        def __init__(self, stride):
            super().__init__(1000, (48, 1, stride, 2))
            self.shape = (8, 2, 1, 3)

    made = [layout(kv_caches={"a": Single(stride)}, groups=[["a"]]) for stride in (6, 24)]
    assert made[0] == made[1]


def test_tiers_of_one_of_two_connectors_are_enough():
    one = Core({"weights": "a"})
    inside = [
        {"kv_connector": "SimpleCPUOffloadConnector"},
        vars(one.vllm_config.kv_transfer_config),
    ]
    one.vllm_config.kv_transfer_config = transfer("MultiConnector", connectors=inside)
    assert one.digest() is not None
