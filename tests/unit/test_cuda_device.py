"""The emulated CUDA device answers as the documentation says, and each of its rules is noticed."""

import os
import shutil
import subprocess

import pytest

from harness.cuda.device import build
from harness.gpu import conformance
from harness.gpu.seen import Seen

pytestmark = pytest.mark.skipif(
    not shutil.which("g++") or build.headers(None) is None, reason="no g++, or no headers of CUDA"
)
# The check that notices that a rule is not there.
RULES = {
    "access": "access",
    "current context": "initialization",
    "free unmapped": "mapping",
    "legacy stream": "legacy",
    "mapped when it runs": "unmapped_early",
    "query events": "synchronized",
    "quiet waits": "quiet",
    "read after write": "read_after_write",
    "register once": "registration",
    "sticky errors": "unmapped_early",
    "synchronize events": "synchronized",
    "unwritten memory": "unwritten",
    "wait for events": "ordered",
    "write after read": "write_after_read",
    "write after write": "write_after_write",
    "cuMemUnmap": "unmapped_early",
    "cudaFreeHost": "freed_early",
    "cudaHostUnregister": "unregistered_early",
}


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    folder = tmp_path_factory.mktemp("device")
    build.build(folder, defines=("-O0", "-DKVPATCH_MUTANTS"))
    build.conformance(folder / "conformance")
    return folder


def ask(device, *checks, **environment):
    """Return the exit status of the checks, and what they printed."""
    command = [device / "conformance", device / "libcuda.so.1", device / "libcudart.so.13", *checks]
    own = {"EMU_DEVICE": "256MiB", "EMU_DEVICE_DIR": str(device)}
    done = subprocess.run(
        command, env=os.environ | own | environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("delay", ["none", "random", "copies last", "compute last"])
def test_it_answers_as_the_documentation_says(device, delay):
    status, printed = ask(device, EMU_DELAY=delay, EMU_SEED="7")
    assert status == 0, printed
    assert printed.count("right ") == len(ask(device, "--list")[1].split())


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_that_is_left_out_is_noticed(device, rule):
    status, printed = ask(device, RULES[rule], EMU_WITHOUT=rule)
    assert status == 1, printed


def test_the_step_of_the_kit_notes_each_answer(device, tmp_path, monkeypatch):
    monkeypatch.setenv("EMU_DEVICE", "256MiB")
    monkeypatch.setenv("EMU_DEVICE_DIR", str(tmp_path))
    monkeypatch.setenv("EMU_WITHOUT", "register once")
    seen = Seen(tmp_path / "conformance.json")
    libraries = [str(device / name) for name in (conformance.DRIVER, conformance.RUNTIME)]
    conformance.ask(device / "conformance", *libraries, seen)
    (wrong,) = seen.wrong
    assert wrong.startswith("registration: ")
    assert "mapping" in seen.right


def test_every_rule_has_its_check():
    found = set()
    for source in build.HERE.glob("*.cpp"):
        found |= set(build.RULE.findall(source.read_text()))
    assert found == set(RULES)


def test_complaints_are_in_a_file_at_once(device, tmp_path):
    ask(device, "freed_early", EMU_COMPLAINTS=str(tmp_path / "complaints"))
    (line,) = (tmp_path / "complaints").read_text().splitlines()
    pid, _, said = line.partition(" ")
    assert pid.isdigit()
    assert said.startswith("RACE: cudaFreeHost writes at ")
    assert "not ordered after memcpy of stream" in said


def test_a_call_that_is_not_there_says_its_name(device):
    names = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=just-symbols", device / "libcudart.so.13"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "cudaGraphLaunch@@libcudart.so.13" in names
    assert "cudaMemcpyAsync@@libcudart.so.13" in names
