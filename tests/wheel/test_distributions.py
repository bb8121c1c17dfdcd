"""What is in the two wheels: kvpatch for every machine, the host device for those without a GPU."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

from kvpatch.version import VERSION

ROOT = Path(__file__).parents[2]
HOST = "kvpatch/hostdevice/"


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def sources(folder: Path) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in folder.rglob("*.py")}


def test_kvpatch_has_nothing_of_the_host_device(wheel):
    assert not {name for name in names(wheel) if name.startswith(HOST) or "/torch/" in name}


def test_kvpatch_has_everything_else(wheel):
    wanted = sources(ROOT / "kvpatch") - sources(ROOT / HOST) - sources(ROOT / "kvpatch/startup")
    assert {name for name in names(wheel) if name.endswith(".py")} == wanted | {
        "kvpatch_startup.py"
    }


def test_type_checkers_read_kvpatch(wheel):
    assert "kvpatch/py.typed" in names(wheel)


def test_kvpatch_has_no_other_package(wheel):
    """A dist-info or a torch in it would be found by pip, or imported."""
    tops = {name.partition("/")[0] for name in names(wheel)}
    assert tops == {
        "kvpatch",
        f"kvpatch-{VERSION}.dist-info",
        "kvpatch-init.pth",
        "kvpatch-init.start",
        "kvpatch_startup.py",
    }
    assert not {
        name
        for name in names(wheel)
        if name.count(".dist-info")
        and "/" in name
        and not name.startswith(f"kvpatch-{VERSION}.dist-info/")
    }


def test_the_host_device_has_its_files_and_no_other(host_wheel):
    found = {name for name in names(host_wheel) if ".dist-info/" not in name or HOST in name}
    assert {name for name in found if not name.startswith(HOST)} == set()
    assert {name for name in found if name.endswith(".py")} == sources(ROOT / HOST)
    assert {f"{HOST}include/cuda.h", f"{HOST}LICENSE"} <= found


def test_the_host_device_needs_the_kvpatch_that_it_was_built_with(host_wheel):
    (metadata,) = [name for name in names(host_wheel) if name.endswith("0.dist-info/METADATA")]
    text = zipfile.ZipFile(host_wheel).read(metadata).decode()
    assert re.findall("^Version: (.*)$", text, re.M) == [VERSION]
    assert f"Requires-Dist: kvpatch=={VERSION}" in text


LOOK = "from importlib.util import find_spec; print(find_spec('kvpatch.hostdevice') is not None)"


def test_both_install_beside_each_other(fresh, run, host_wheel):
    assert run(fresh.python, "-c", LOOK).out == "False\n"
    fresh.pip("install", "--quiet", "--no-deps", host_wheel)
    assert run(fresh.python, "-c", LOOK).out == "True\n"
    code = "from kvpatch.hostdevice import ledger; print(ledger.device_size())"
    done = run(fresh.python, "-c", code, KVPATCH="0", KVPATCH_HOST_DEVICE="4MiB")
    assert (done.out, done.err) == (f"{4 << 20}\n", "")
    fresh.pip("uninstall", "--quiet", "--yes", "kvpatch-hostdevice")
    assert run(fresh.python, "-c", LOOK).out == "False\n"
    assert run(fresh.python, "-m", "kvpatch", "--version").out == f"kvpatch {VERSION}\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("doctor", 1),
        ("matrix", 0),
        ("matrix --rows", 0),
        ("status", 1),
        ("dashboard", 0),
        ("dashboard --alerts", 0),
    ],
)
def test_every_command_runs_without_the_host_device(fresh, run, command, code):
    """And without torch."""
    done = run(fresh.python, "-m", "kvpatch", *command.split())
    assert (done.code, done.err) == (code, "")


@pytest.mark.parametrize(
    ("settings", "cpu", "sentence"),
    [
        ({}, True, "this machine has no GPU, because the host device is a distribution of its own"),
        ({"KVPATCH_HOST_DEVICE": "2GiB"}, False, "KVPATCH_HOST_DEVICE is set, because the host"),
    ],
    ids=["on a CPU", "asked for"],
)
def test_without_the_host_device_vllm_is_refused_where_it_is_needed(
    fresh, run, settings, cpu, sentence
):
    (fresh.site / "vllm/platforms.py").write_text(
        "from types import SimpleNamespace\n"
        f"current_platform = SimpleNamespace(is_cpu=lambda: {cpu})\n"
    )
    code = "from kvpatch.patches.host_device import presence\npresence.wanted()"
    done = run(fresh.python, "-c", code, KVPATCH="0", **settings)
    assert sentence in done.last_line
    assert done.last_line.endswith("[KVP504]")
