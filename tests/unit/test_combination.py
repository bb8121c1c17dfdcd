"""What a verdict holds for, read from a configuration."""

import enum
import json
import sys
from dataclasses import dataclass, field
from importlib import metadata
from types import SimpleNamespace

import pytest
from fakes import module, raising

from kvpatch.upstream import combination
from kvpatch.version import VERSION
from kvpatch.versions import Facts, Installed


def facts(**environment):
    installed = Installed.release("vllm", "0.32.0"), Installed.release("kvcached", "0.1.6")
    return Facts(*installed, environment, "cuda")


def config(described=None, extra=None, **changes):
    shape = {"num_hidden_layers": 4, "_name_or_path": "a"} | (described or {})
    transfer = SimpleNamespace(
        kv_connector="OffloadingConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config=extra or {},
        kv_role="kv_both",
    )
    parts = {
        "model_config": SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: shape), architecture="Llama", dtype="half"
        ),
        "cache_config": SimpleNamespace(block_size=16, cache_dtype="auto"),
        "parallel_config": SimpleNamespace(world_size=2, data_parallel_size=3),
        "kv_transfer_config": transfer,
    }
    return SimpleNamespace(**parts | changes)


def of(**changes):
    """Return what a configuration is compared by, with its environment."""
    environment = changes.pop("environment", {})
    return combination.of(config(**changes), facts(**environment))


@pytest.fixture(autouse=True)
def device(monkeypatch):
    here = SimpleNamespace(get_device_name=lambda: "NVIDIA H100")
    platforms = module(monkeypatch, "vllm.platforms", current_platform=here)
    installed = {"torch": "2.13.0"}

    def version(name):
        if name in installed:
            return installed[name]
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(combination.metadata, "version", version)
    return platforms


def test_it_survives_its_file():
    found = combination.of(config(), facts())
    assert json.loads(json.dumps(found)) == found
    assert found["versions"] | {"python": ""} == {
        "kvpatch": VERSION,
        "vllm": "0.32.0",
        "kvcached": "0.1.6",
        "torch": "2.13.0",
        "python": "",
    }
    assert found["device"] == "cuda NVIDIA H100"
    assert set(found["code"]) == {"kvpatch", "kvcached", "vllm"}


def test_models_of_one_shape_are_one_whatever_their_names():
    first = combination.model(config())
    assert combination.model(config({"_name_or_path": "b", "transformers_version": "5"})) == first
    assert combination.model(config({"num_hidden_layers": 5})) != first


def test_how_a_connector_copies_matters_and_how_much_does_not():
    def flags(**extra):
        return combination.flags(config(extra=extra), facts())

    assert flags(cpu_bytes_to_use=1) == flags(cpu_bytes_to_use=2)
    assert flags(num_cpu_blocks=1) == flags(num_cpu_blocks=2)
    assert flags(block_size=64) != flags(block_size=128)
    assert flags(lazy_offload=True) != flags()
    for name in ("spec_module_path", "cache_policy_module_path", "self_describing_bytes"):
        assert flags(**{name: "one"}) != flags(**{name: "two"})
    tiers = [
        flags(secondary_tiers=[{"type": "fs", **more}])
        for more in ({"root_dir": "/a"}, {"root_dir": "/b"}, {"module_path": "mine"})
    ]
    assert tiers[0] == tiers[1] != tiers[2]


def test_settings_that_choose_the_code_matter():
    first = combination.flags(config(), facts())
    cache = SimpleNamespace(block_size=16, cache_dtype="fp8")
    assert combination.flags(config(cache_config=cache), facts()) != first
    assert combination.flags(config(), facts(KVCACHED_CONTIGUOUS_LAYOUT="false")) != first
    assert combination.flags(config(), facts(KVPATCH_LOG="debug")) == first
    for name in ("KVPATCH_HOST_POOL", "KVPATCH_IDLE", "KVPATCH_FIRST_LIMIT"):
        assert combination.flags(config(), facts(**{name: "1"})) != first
        sizes = [combination.flags(config(), facts(**{name: size})) for size in ("1", "2")]
        assert sizes[0] == sizes[1]
    own = SimpleNamespace(scheduler_cls=combination.Any)
    assert combination.flags(config(scheduler_config=own), facts()) != first


class Mode(enum.Enum):
    """One of vLLM's enumerations."""

    FULL = 1
    NONE = 0


@dataclass
class CacheConfig:
    """vLLM's, as far as these tests need it."""

    block_size: int = 16
    skip_layers: list[str] = field(default_factory=list)
    mode: Mode = Mode.FULL
    num_gpu_blocks: int = 0


def test_a_field_of_a_release_that_nobody_has_seen_matters():
    @dataclass
    class Next(CacheConfig):
        calculate_kv_scales: bool = False

    assert of(cache_config=Next()) != of(cache_config=Next(calculate_kv_scales=True))
    assert of(cache_config=Next()) != of(cache_config=CacheConfig())


@pytest.mark.parametrize(
    "other",
    [CacheConfig(17), CacheConfig(skip_layers=["sliding_window"]), CacheConfig(mode=Mode.NONE)],
)
def test_every_field_matters_but_those_that_cannot(other):
    assert of(cache_config=other) != of(cache_config=CacheConfig())
    sized = CacheConfig(num_gpu_blocks=9)
    sized.attached = object()
    assert of(cache_config=sized) == of(cache_config=CacheConfig())


def drafted(**described):
    hf_config = SimpleNamespace(to_dict=lambda: {"_name_or_path": "d"} | described)
    return SimpleNamespace(
        method="draft_model", draft_model_config=SimpleNamespace(hf_config=hf_config)
    )


@pytest.mark.fault(
    "a draft model of another shape than the one that was verified",
    "the verdict does not hold, and the log says in what it is another",
)
def test_the_shape_of_a_draft_model_matters():
    first = of(speculative_config=drafted(num_hidden_layers=1))
    assert first == of(speculative_config=drafted(num_hidden_layers=1, _name_or_path="another"))
    assert first != of(speculative_config=drafted(num_hidden_layers=9))
    assert first != of(speculative_config=drafted(num_hidden_layers=1, sliding_window=128))


def test_what_is_no_value_of_json_is_held_without_its_address():
    class Quant:
        def __init__(self, bits):
            self.bits, self.own, self.stages = bits, self, [SimpleNamespace(bits=bits)]

    class Bare:
        pass

    assert of(quant_config=Quant(4)) == of(quant_config=Quant(4)) != of(quant_config=Quant(8))
    assert of(additional_config=Bare()) == of(additional_config=Bare())
    for one, two in (([Quant(4)], [Quant(8)]), ({"a": {1}}, {"a": {2}}), (Quant, Bare), ({}, None)):
        found = of(additional_config=one)
        assert found != of(additional_config=two)
        assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize(
    ("name", "matters"),
    [
        ("VLLM_PP_LAYER_PARTITION", True),
        ("VLLM_MLA_DISABLE", True),
        ("VLLM_OF_A_RELEASE_THAT_NOBODY_HAS_SEEN", True),
        ("KVCACHED_PAGE_SIZE_MB", True),
        ("K_SCALE_CONSTANT", True),
        ("LD_PRELOAD", True),
        ("VLLM_API_KEY", False),
        ("VLLM_SERVER_DEV_MODE", False),  # kvpatch verify sets it
        ("VLLM_LOGGING_LEVEL", False),
        ("VLLM_PORT", False),
        ("VLLM_CHAT_SERVICE_HOST", False),
        ("VLLM_CHAT_PORT_8000_TCP_ADDR", False),
        ("KVCACHED_IPC_NAME", False),
        ("HOME", False),
    ],
)
def test_a_variable_matters_unless_it_is_known_not_to(name, matters):
    assert (of(environment={name: "1"}) != of()) is matters
    assert (of(environment={name: "1"}) != of(environment={name: "2"})) is matters


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A package of the operator's, which cannot be imported, and a module."""
    (tmp_path / "mine").mkdir()
    for name in ("mine/__init__.py", "mine/scheduler.py", "mine/policy.py", "alone.py"):
        (tmp_path / name).write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.fault(
    "the code of a scheduler, worker, tier or eviction policy of the operator's changes after it "
    "was verified",
    "the verdict holds no more, and `kvpatch doctor` says so",
)
@pytest.mark.parametrize(
    "changes",
    [
        {"scheduler_config": SimpleNamespace(scheduler_cls="mine.scheduler.Mine")},
        {"parallel_config": SimpleNamespace(worker_extension_cls="mine.Extension")},
        {"extra": {"cache_policy_module_path": "mine"}},
        {"extra": {"secondary_tiers": [{"type": "own", "module_path": "mine.tier"}]}},
    ],
    ids=str,
)
def test_the_code_that_settings_name_matters(mine, changes):
    before = of(**changes)
    assert of(**changes) == before
    (mine / "mine/policy.py").write_text("changed")
    after = of(**changes)
    assert after["flags"] == before["flags"]
    assert {name for name, digest in after["code"].items() if before["code"][name] != digest} == {
        "mine"
    }


def test_a_module_that_is_no_package_is_code_too(mine):
    extra = {"spec_module_path": "alone"}
    before = of(extra=extra)
    (mine / "alone.py").write_text("changed")
    assert of(extra=extra) != before


def test_plugins_matter_and_their_code(mine):
    before = of()
    (mine / "mine-1.dist-info").mkdir()
    (mine / "mine-1.dist-info/METADATA").write_text("Name: mine\nVersion: 1\n")
    entry = "[vllm.general_plugins]\nown = mine.policy:register\n"
    (mine / "mine-1.dist-info/entry_points.txt").write_text(entry)
    with_it = of()
    assert with_it["flags"] != before["flags"]
    assert with_it["code"]["mine"]


def test_the_compiled_code_of_kvcached_matters(tmp_path, monkeypatch):
    (tmp_path / "kvcached").mkdir()
    (tmp_path / "kvcached/__init__.py").touch()
    extension = tmp_path / "kvcached/_C.cpython-311-x86_64-linux-gnu.so"
    extension.write_bytes(b"one")
    monkeypatch.delitem(sys.modules, "kvcached", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    before = of()
    extension.write_bytes(b"two")
    assert of() != before


def test_the_host_device_is_a_device_and_one_without_a_name_is_none(device):
    here = facts(KVPATCH_HOST_DEVICE="1GiB")
    assert combination.device(here) == "cuda NVIDIA H100"  # which does not use it
    assert combination.device(here._replace(device="cpu")) == "the host device"
    device.current_platform.get_device_name = raising(RuntimeError("no driver"))
    assert combination.device(facts()) == ""


def test_the_workers_of_all_engines_are_counted():
    assert combination.workers(config()) == 6
    assert combination.copiers(config()) == 1
