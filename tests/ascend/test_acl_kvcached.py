"""kvcached's own C++, unchanged, on the ACL runtime."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvpatch.ascend import runtime
from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR

HERE = Path(__file__).parent


@pytest.fixture(scope="module", params=[False, True], ids=["per layer", "contiguous"])
def life(request, kvcached, tmp_path_factory):
    """What a process saw of two layers' pools from their making to their end."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHED")}
    environment = {
        **kept,
        "KVPATCH": "0",
        "KVCACHED_AUTOPATCH": "0",
        "PYTHONPATH": str(kvcached),
        HOST_DEVICE.name: "256MiB",
        HOST_DEVICE_DIR.name: str(tmp_path_factory.mktemp("ledger")),
    }
    command = [sys.executable, str(HERE / "pools.py"), str(request.param)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**seen, "contiguous": request.param, "stderr": done.stderr}


def test_the_sources_are_kvcacheds_own_and_the_calls_acls(life):
    assert life["runtime"] == 2  # the emulator; 1 is CANN
    assert life["on libascendcl.so"]


def test_reserving_costs_the_scratch_page_only(life):
    assert life["free"] == 256
    assert life["free after reserving"] == 254 if not life["contiguous"] else 248


def test_mapping_takes_pages_and_unmapping_gives_them_back(life):
    assert life["free after reserving"] - life["free after mapping"] == 8
    assert life["free after unmapping"] == life["free after reserving"]


def test_a_mapped_page_keeps_its_bytes_and_an_unmapped_one_loses_them(life):
    assert life["written"] == [7, 7, 7]
    assert life["after unmapping"] != [7, 7, 7]


def test_every_hole_is_the_one_scratch_page(life):
    assert life["written to one hole, read in another"] == [9, 9, 9]


def test_the_pool_of_a_pages_own_thread_needs_no_device(life):
    """kvcached maps pages ahead of need in a thread that selects no device; ACL wants one."""
    assert life["mapped in a thread"]


def test_the_end_gives_everything_back(life):
    """The whole pool is unmapped at once, which ACL does mapping by mapping."""
    assert life["free at the end"] == 256
    assert "failed" not in life["stderr"]


def test_cann_is_preferred_and_told_from_the_emulator(emulator, tmp_path):
    found = runtime.find({"ASCEND_HOME_PATH": str(emulator)})
    assert found == (emulator, True)
    (tmp_path / "include/acl").mkdir(parents=True)
    (tmp_path / "lib64").mkdir()
    (tmp_path / "include/acl/acl.h").write_text("#include <acl/acl_rt.h>\n")
    assert runtime.find({"ASCEND_HOME_PATH": str(tmp_path)}) is None  # the headers alone
    (tmp_path / "lib64/libascendcl.so").touch()
    assert runtime.find({"ASCEND_HOME_PATH": str(tmp_path)}) == (tmp_path, False)
    assert runtime.find({"ASCEND_TOOLKIT_HOME": str(tmp_path)}) == (tmp_path, False)


def test_without_cann_and_emulator_there_is_one_sentence(monkeypatch, capsys):
    from kvpatch.ascend import __main__ as command

    monkeypatch.setattr(runtime, "find", lambda: None)
    monkeypatch.setattr(runtime.distributions, "acl_emulator", lambda: None)
    assert command.install("0.1.6", False, None) == 1
    assert capsys.readouterr().err == (
        "CANN was not found, and the ACL emulator is not installed; source CANN's set_env.sh, "
        "or, to test without an NPU, install kvpatch-hostdevice\n"
    )
