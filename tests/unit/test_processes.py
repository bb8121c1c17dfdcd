"""harness.processes: a function in a process of its own, and what its environment has."""

import os

import pytest

from harness import processes
from harness.console import HarnessError

MODULE = """
import os

def twice(job):
    print("progress 1")
    print("other")
    return {"twice": 2 * job["number"], "pid": os.getpid(), "debug": os.environ["KVPATCH_DEBUG"]}
"""


@pytest.fixture
def call(tmp_path):
    (tmp_path / "its_module.py").write_text(MODULE)
    environment = processes.on_host_device(tmp_path, KVPATCH_DEBUG="1", KVPATCH="0")
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)

    def call(job, **options):
        return processes.call("its_module:twice", job, tmp_path, environment, **options)

    return call


def test_it_runs_elsewhere_and_returns(call, capfd):
    found = call({"number": 21}, follow="progress")
    assert (found["twice"], found["debug"]) == (42, "1")
    assert found["pid"] != os.getpid()
    assert capfd.readouterr().out == "progress 1\n"


def test_a_failure_has_the_end_of_the_log(call):
    call({"number": 1})
    with pytest.raises(HarnessError, match=r"its_module:twice ended with status 1:(.|\n)*KeyError"):
        call({})  # the result of the call before is not taken for its own


def test_an_engine_inherits_nothing_that_configures_it(tmp_path, monkeypatch):
    for name in ("KVPATCH_DEBUG", "KVCACHED_IPC_NAME", "VLLM_USE_V1", "TRITON_INTERPRET"):
        monkeypatch.setenv(name, "1")
    environment = processes.on_host_device(tmp_path)
    assert not {"KVPATCH_DEBUG", "KVCACHED_IPC_NAME", "VLLM_USE_V1", "TRITON_INTERPRET"} & set(
        environment
    )
    assert environment["KVPATCH_HOST_DEVICE_DIR"] == str(tmp_path)


def test_an_engine_s_status_page_is_where_the_test_s_file_wants_it(tmp_path, monkeypatch):
    """One that another file's engine left would be in the answer of ``kvpatch status``."""
    monkeypatch.setenv("KVPATCH_STATUS_DIR", str(tmp_path / "status"))
    environment = processes.on_host_device(tmp_path)
    assert environment["KVPATCH_STATUS_DIR"] == str(tmp_path / "status")
    monkeypatch.delenv("KVPATCH_STATUS_DIR")
    assert processes.on_host_device(tmp_path)["KVPATCH_STATUS_DIR"] == str(tmp_path)
