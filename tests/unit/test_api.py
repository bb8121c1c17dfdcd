"""What a program may import from kvpatch."""

import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import kvpatch
from kvpatch import api
from kvpatch.refusal import Refusal
from kvpatch.telemetry import status_page

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/python.md").read_text()


def test_all_of_it_is_there():
    assert dir(kvpatch) == kvpatch.__all__ == ["Process", "Refusal", "__version__", "status"]
    assert kvpatch.Refusal is Refusal
    assert kvpatch.Process is api.Process
    with pytest.raises(AttributeError, match="module 'kvpatch' has no attribute 'statuses'"):
        kvpatch.statuses  # noqa: B018


def test_nothing_of_it_is_imported_before_it_is_asked_for(run):
    code = "import sys, kvpatch; print(sorted(n for n in sys.modules if n[:8] == 'kvpatch.'))"
    done = run(sys.executable, "-c", code, KVPATCH="0", PYTHONPATH=ROOT)
    assert done.out == "['kvpatch.bootstrap', 'kvpatch.environ', 'kvpatch.version']\n"


@pytest.mark.parametrize("first", ["", "from kvpatch.status import record\n"])
def test_status_is_a_call_whether_its_module_was_imported_or_not(run, first):
    code = f"{first}import kvpatch; print(kvpatch.status())"
    done = run(sys.executable, "-c", code, KVPATCH="0", PYTHONPATH=ROOT)
    assert (done.code, done.out) == (0, "[]\n")


def test_status_is_what_a_page_says(place):
    writer = status_page.Writer(os.getpid(), "0.1.0")
    described = {
        "roles": ["engine-core", "worker"],
        "elastic": True,
        "features": {"fence": "applied"},
        "engine": {"model": "m", "requests": {"running": 1, "waiting": 0}},
    }
    writer.write(described)
    (process,) = kvpatch.status()
    assert kvpatch.status(os.getpid()) == [process]
    assert (process.pid, process.state, process.line) == (os.getpid(), "runs", "")
    assert process.roles == ("engine-core", "worker")
    assert process.elastic is True
    assert process.features == {"fence": "applied"}
    assert process.engine["requests"] == {"running": 1, "waiting": 0}


@pytest.mark.parametrize("elastic", [True, False])
def test_the_check_of_the_documentation_is_of_engines_that_run(place, elastic):
    """Beside the page of an engine that was restarted it failed."""
    (code,) = re.findall(r"```python\n(import kvpatch\n\n.*?)```", PAGE, re.DOTALL)
    for pid in (4_000_000, os.getpid()):
        status_page.Writer(pid, "0.1.0").write({"elastic": elastic})
    with nullcontext() if elastic else pytest.raises(AssertionError):
        exec(code, {})


def test_status_of_a_process_that_is_unknown_is_not_elastic(place):
    other = subprocess.Popen(["sleep", "60"])
    try:
        (process,) = kvpatch.status(other.pid)
    finally:
        other.kill()
        other.wait()
    assert (process.state, process.elastic, process.roles) == ("unknown", None, ())
    assert process.line.startswith(f"pid {other.pid} has no status page")
