"""The probe of an NPU, on the emulator: what it asks of ACL and of kvcached."""

import os
import subprocess
import sys

import pytest

from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR


@pytest.fixture(scope="module")
def done(emulator, kvcached, tmp_path_factory):
    """The command, as an operator runs it."""
    folder = tmp_path_factory.mktemp("probe")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHED")}
    environment = {
        **kept,
        "KVPATCH": "0",
        "KVCACHED_AUTOPATCH": "0",
        "PYTHONPATH": f"{kvcached}:{os.environ.get('PYTHONPATH', '')}",
        "ASCEND_HOME_PATH": str(emulator),
        "XDG_DATA_HOME": str(folder),
        HOST_DEVICE.name: "256MiB",
        HOST_DEVICE_DIR.name: str(folder),
    }
    command = [sys.executable, "-m", "kvpatch.ascend", "probe"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "question",
    [
        "one page at thousands of addresses",
        "batched copies of mapped pages, and across two",
        "freed memory is free for others",
        "kvcached's pools, computation on a page and a hole",
    ],
)
def test_what_the_probe_asks_is_right_by_the_documents(done, question):
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{question}: ")]
    assert line.startswith(f"{question}: right: "), done.stdout + done.stderr


def test_a_page_that_is_unmapped_under_a_copy_is_lost_here(done):
    assert "a page unmapped under a copy: seen: unmap returned after " in done.stdout
    assert "the bytes were lost" in done.stdout


def test_without_torch_npu_it_is_not_finished(done):
    assert "copies behind the computation: not asked: torch_npu is not installed" in done.stdout
    assert "the probe was unfinished" in done.stdout
    assert done.returncode == 3
