"""The host device while a call of the kernel fails."""

import errno
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR
from kvpatch.hostdevice import ledger
from kvpatch.hostdevice.streams import Stream

CALLS = {
    "open": errno.EMFILE,
    "flock": errno.ENOLCK,
    "ftruncate": errno.ENOSPC,
    "fallocate": errno.ENOSPC,
    "memfd_create": errno.EMFILE,
    "mmap": errno.ENOMEM,
}


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The device as kvcached compiles it, every call of which can fail."""
    made = tmp_path_factory.mktemp("host-device") / "faults"
    source = Path(__file__).with_name("host_device_faults.cpp")
    include = Path(ledger.__file__).with_name("include")
    wrapped = [f"-Wl,--wrap={call}" for call in (*CALLS, "fopen")]
    (torch,) = find_spec("torch").submodule_search_locations  # what it includes besides
    headers = [f"-I{include}", f"-I{torch}/include"]
    command = ["g++", "-std=c++20", "-O1", *headers, source, "-o", made, *wrapped]
    subprocess.run([str(word) for word in command], check=True)
    return made


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.fault(
    "the n-th open, flock, ftruncate, fallocate, memfd_create or mmap of the host device fails, "
    "for all n",
    "the call of CUDA returns an error and the next one succeeds; a page whose release could not "
    "be noted stays charged until its process ends",
)
def test_a_call_of_the_host_device_that_fails(program, tmp_path, call):
    done = subprocess.run(
        [program, call, str(CALLS[call])],
        env=os.environ | {HOST_DEVICE.name: "64MiB", HOST_DEVICE_DIR.name: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert int(done.stdout) > 0


def fail(*args: Any, **kwargs: Any) -> Any:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.fixture
def no_descriptor(monkeypatch):
    monkeypatch.setattr(Path, "open", fail)
    monkeypatch.setattr(os, "open", fail)


@pytest.fixture
def no_lock(monkeypatch):
    monkeypatch.setattr(ledger.fcntl, "flock", fail)


@pytest.mark.parametrize("fault", ["no_descriptor", "no_lock"])
@pytest.mark.fault(
    "a copy of the host device cannot ask for its permit (no descriptor, no lock)",
    "its event has the error, which ends the transfer; the stream goes on",
)
def test_a_copy_without_its_permit(tmp_path, monkeypatch, request, fault):
    monkeypatch.setenv(HOST_DEVICE.name, "64MiB")
    monkeypatch.setenv(HOST_DEVICE_DIR.name, str(tmp_path))
    stream, ran = Stream("test"), []
    stream.submit(lambda: ran.append("before")).synchronize()
    request.getfixturevalue(fault)
    failed = stream.submit(lambda: ran.append("without"))
    failed.synchronize()
    assert isinstance(failed.error, OSError)
    stream.close()
    assert ran == ["before"]
