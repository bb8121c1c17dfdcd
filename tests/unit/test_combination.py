"""What a verdict of ``kvpatch verify`` holds for, read from a configuration."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvpatch.upstream import combination
from kvpatch.version import VERSION
from kvpatch.versions import Facts, Installed


def facts(**environment: str) -> Facts:
    installed = Installed.release("vllm", "0.32.0"), Installed.release("kvcached", "0.1.6")
    return Facts(*installed, environment, "cuda")


def config(described: dict[str, Any] | None = None, extra: Any = None, **changes: Any) -> Any:
    shape = {"num_hidden_layers": 4, "_name_or_path": "a"} | (described or {})
    transfer = SimpleNamespace(
        kv_connector="OffloadingConnector",
        kv_connector_module_path=None,
        kv_connector_extra_config=extra or {},
        kv_role="kv_both",
    )
    parts: dict[str, Any] = {
        "model_config": SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: shape), architecture="Llama", dtype="half"
        ),
        "cache_config": SimpleNamespace(block_size=16, cache_dtype="auto"),
        "parallel_config": SimpleNamespace(world_size=2, data_parallel_size=3),
        "kv_transfer_config": transfer,
    }
    return SimpleNamespace(**parts | changes)


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Any:
    platforms = ModuleType("vllm.platforms")
    platforms.current_platform = SimpleNamespace(  # type: ignore[attr-defined]
        get_device_name=lambda: "NVIDIA H100"
    )
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(combination.metadata, "version", lambda name: "2.13.0")
    return platforms


def test_it_survives_its_file() -> None:
    found = combination.of(config(), facts(), ["nowhere.at_all"])
    assert json.loads(json.dumps(found)) == found
    assert found["versions"] | {"python": ""} == {
        "kvpatch": VERSION,
        "vllm": "0.32.0",
        "kvcached": "0.1.6",
        "torch": "2.13.0",
        "python": "",
    }
    assert found["device"] == "cuda NVIDIA H100"
    assert set(found["code"]) == {"kvpatch", "nowhere.at_all"}


def test_models_of_one_shape_are_one_whatever_their_names() -> None:
    first = combination.model(config())
    assert combination.model(config({"_name_or_path": "b", "transformers_version": "5"})) == first
    assert combination.model(config({"num_hidden_layers": 5})) != first


def test_how_a_connector_copies_matters_and_how_much_does_not() -> None:
    def flags(**extra: Any) -> Any:
        return combination.flags(config(extra=extra), facts())

    assert flags(cpu_bytes_to_use=1) == flags(cpu_bytes_to_use=2)
    assert flags(num_cpu_blocks=1) == flags(num_cpu_blocks=2)
    assert flags(block_size=64) != flags(block_size=128)
    assert flags(lazy_offload=True) != flags()


def test_settings_that_choose_the_code_matter() -> None:
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


def test_the_host_device_is_a_device_and_one_without_a_name_is_none(device: Any) -> None:
    here = facts(KVPATCH_HOST_DEVICE="1GiB")
    assert combination.device(here) == "cuda NVIDIA H100"  # which does not use it
    assert combination.device(here._replace(device="cpu")) == "the host device"

    def fails() -> str:
        raise RuntimeError("no driver")

    device.current_platform.get_device_name = fails
    assert combination.device(facts()) == ""


def test_the_workers_of_all_engines_are_counted() -> None:
    assert combination.workers(config()) == 6
    assert combination.copiers(config()) == 1
