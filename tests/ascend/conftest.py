"""The ACL emulator, built once, with a device of its own for every test."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR
from kvpatch.hostdevice.acl import library

sys.path.append(str(Path(__file__).parent))
from acl_runtime import ACL


@pytest.fixture(scope="session")
def emulator(tmp_path_factory):
    """Its folder, laid out as CANN's."""
    return library.build(tmp_path_factory.mktemp("acl"))


@pytest.fixture(scope="session")
def kvcached(emulator, tmp_path_factory):
    """A folder with kvcached, installed by the command that operators run."""
    target = tmp_path_factory.mktemp("kvcached")
    command = [sys.executable, "-m", "kvpatch.ascend", "install", "--target", str(target)]
    environment = {**os.environ, "KVPATCH": "0", "ASCEND_HOME_PATH": str(emulator)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"kvcached 0.1.6 against the ACL emulator in {emulator}" in done.stdout
    return target


@pytest.fixture
def device(emulator, tmp_path, monkeypatch):
    """A device of 64 MiB that this process alone uses."""
    monkeypatch.setenv(HOST_DEVICE.name, "64MiB")
    monkeypatch.setenv(HOST_DEVICE_DIR.name, str(tmp_path))
    # A copy, so that each test has a runtime that was never started.
    own = shutil.copy(emulator / "lib64" / library.LIBRARY, tmp_path / "libascendcl.so")
    acl = ACL(Path(own))
    acl.ok("aclInit", None)
    acl.ok("aclrtSetDevice", 0)
    yield acl
    acl.tidy()
