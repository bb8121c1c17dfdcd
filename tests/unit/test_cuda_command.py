"""What ``scripts/cuda`` gives a program: kvpatch on, and settings of the caller's."""

import json
import signal
import sys
from pathlib import Path

import pytest

from harness.cuda import emulated

pytestmark = pytest.mark.skipif(
    sys.version_info < (3, 11), reason="the environments of CUDA builds have an option -P of 3.11"
)
PROGRAM = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"


@pytest.fixture(autouse=True)
def handlers():
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    yield
    for one, handler in before.items():
        signal.signal(one, handler)


def given(monkeypatch, folder, *options):
    program, out = folder / "program.py", folder / "environment.json"
    program.write_text(PROGRAM)
    monkeypatch.setattr(emulated, "made", lambda version: Path(sys.executable))
    monkeypatch.setattr(sys, "argv", ["scripts/cuda", *options, str(program), str(out)])
    assert emulated.main() == 0
    return dict(json.loads(out.read_text()))


def test_a_program_has_kvpatch_and_the_callers_settings(monkeypatch, tmp_path):
    monkeypatch.setenv("KVPATCH", "0")  # the harness's own
    monkeypatch.setenv("KVPATCH_DEBUG", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = given(monkeypatch, tmp_path, "--delays", "copies last:7", "--device", "2GiB")
    assert (found["KVPATCH"], found["KVPATCH_DEBUG"], found["EMU_DEVICE"]) == ("1", "1", "2GiB")
    assert (found["EMU_DELAY"], found["EMU_SEED"]) == ("copies last", "7")
    assert "PYTHONPATH" not in found  # where the checkout's kvpatch may be


def test_plain_is_without_kvpatch_and_kvcached(monkeypatch, tmp_path):
    found = given(monkeypatch, tmp_path, "--plain")
    assert (found["KVPATCH"], found["ENABLE_KVCACHED"]) == ("0", "false")
