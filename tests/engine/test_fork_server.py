"""Processes of engines are as independent as those of an operator, and their ends are seen."""

import subprocess
from typing import Any

import pytest

from harness.engines.process import server_of
from harness.engines.runs import Run, python_of, run_driver

NO_MODEL: dict[str, Any] = {"model": "/nowhere", "engine": {}, "rounds": []}


@pytest.mark.parametrize("kvpatch", [True, False])
def test_a_fork_has_its_own_environment_and_a_failed_one_its_log(device, tmp_path, kvpatch):
    """Both are forks of one server."""
    ended = run_driver(NO_MODEL, device.environ(Run(kvpatch=kvpatch)), tmp_path)
    assert ended.code == 1
    assert "/nowhere" in ended.log
    assert ended.log.rstrip().splitlines()
    assert ("patches for vllm" in ended.log) is kvpatch
    assert ended.result == {}


def test_the_engines_of_all_tests_are_forks_of_one_server(device, monkeypatch):
    """A server takes longer to start than most of its forks run."""
    servers = []
    for test in ("tests/test_one.py::test_one (call)", "tests/test_two.py::test_two (call)"):
        monkeypatch.setenv("PYTEST_CURRENT_TEST", test)
        servers.append(server_of(python_of(""), device.environ(Run())))
        servers[-1].asked -= 1  # nobody starts a fork here
    assert servers[0] is servers[1]


def test_a_fork_that_takes_too_long_is_killed(device, tmp_path):
    with pytest.raises(subprocess.TimeoutExpired) as late:
        run_driver(NO_MODEL, device.environ(Run()), tmp_path, timeout=0)
    assert isinstance(late.value.output, str)  # the end of its log
