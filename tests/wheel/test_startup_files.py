"""What the installed package does to the start of every Python."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvpatch.gate import check_installed
from kvpatch.versions import Installed

ROOT = Path(__file__).parents[2]
STARTUP = {"kvpatch-init.pth", "kvpatch-init.start", "kvpatch_startup.py"}
NOT_VALIDATED = str(check_installed("vllm", [Installed.release("vllm", "0.17.9")], {}))
FLAGS = pytest.mark.parametrize("flags", [(), ("-I",), ("-E",), ("-s",), ("-O",)], ids=" ".join)
UNSET = [{}, {"KVPATCH": ""}, {"KVPATCH": "0"}]
OFF = [*UNSET, {"KVPATCH": "false"}]


@pytest.fixture
def ends(run):
    """Check how Python code ends: its exit status, and what it prints."""

    def ends(python, code, status=0, out="", err="", **environment):
        done = run(python, "-c", code, **environment)
        assert (done.code, done.out, done.err) == (status, out, err)

    return ends


def without_startup(environment, tmp_path):
    """Copy the environment's interpreter set-up without kvpatch's startup files."""
    folder = tmp_path / "without"
    shutil.copytree(environment.python.parents[1], folder, symlinks=True)
    site = folder / environment.site.relative_to(environment.python.parents[1])
    for name in STARTUP:
        (site / name).unlink()
    return folder / "bin/python"


def test_the_startup_files_are_there(installed):
    assert {path.name for path in installed.site.iterdir()} >= STARTUP


def test_both_startup_files_name_the_same_importable_function(installed, ends):
    (pth,) = (installed.site / "kvpatch-init.pth").read_text().splitlines()
    assert pth.startswith("import os; ")
    assert "import kvpatch_startup" in pth
    assert "kvpatch_startup.start()" in pth
    lines = (installed.site / "kvpatch-init.start").read_text().splitlines()
    (entry,) = [line for line in lines if line and not line.startswith("#")]
    assert entry == "kvpatch_startup:start"
    code = f"from pkgutil import resolve_name; print(resolve_name({entry!r})())"
    ends(installed.python, code, out="None\n")


@FLAGS
@pytest.mark.parametrize("environment", OFF, ids=str)
def test_off_adds_nothing(installed, modules, tmp_path, environment, flags):
    before = modules(without_startup(installed, tmp_path), *flags, **environment)
    assert modules(installed.python, *flags, **environment) - before == set()


@pytest.mark.parametrize("environment", OFF, ids=str)
def test_off_a_startup_file_without_its_stub_says_nothing(fresh, ends, environment):
    """Python prints eight lines for it, in every process."""
    (fresh.site / "kvpatch_startup.py").unlink()
    ends(fresh.python, "pass", **environment)


def test_on_a_startup_file_without_its_stub_stands_before_vllm(fresh, ends):
    (fresh.site / "kvpatch_startup.py").unlink()
    ends(fresh.python, "pass", KVPATCH="1")
    ends(fresh.python, "import vllm", 1, err=NOT_VALIDATED + "\n", KVPATCH="1")


@FLAGS
def test_on_adds_only_what_waits_for_vllm(installed, modules, tmp_path, flags):
    before = modules(without_startup(installed, tmp_path), *flags, KVPATCH="1")
    ours = {"kvpatch", "kvpatch.bootstrap", "kvpatch.environ", "kvpatch.version"}
    added = {"kvpatch_startup", "__future__"} | ours
    assert modules(installed.python, *flags, KVPATCH="1") - before == added


@FLAGS
def test_on_stands_before_vllm(installed, run, flags):
    done = run(installed.python, *flags, "-c", "import vllm", KVPATCH="1")
    assert (done.code, done.out, done.err) == (1, "", NOT_VALIDATED + "\n")


@pytest.mark.parametrize("environment", UNSET, ids=str)
def test_off_leaves_vllm_alone(installed, ends, environment):
    ends(installed.python, "import vllm", out="vllm itself\n", **environment)


def test_without_site_only_an_import_switches_on(installed, modules, run):
    """-S reads no startup files and leaves site-packages to the script."""
    assert not any("kvpatch" in name for name in modules(installed.python, "-S", KVPATCH="1"))
    path = f"import sys; sys.path += {[str(installed.site), str(ROOT)]}\n"
    done = run(installed.python, "-S", "-c", path + "import vllm", KVPATCH="1")
    assert (done.code, done.out, done.err) == (0, "vllm itself\n", "")
    done = run(installed.python, "-S", "-c", path + "import kvpatch, vllm")
    assert (done.code, done.out, done.err) == (1, "", NOT_VALIDATED + "\n")


def test_a_value_that_means_nothing_disturbs_nothing_but_vllm(installed, ends, run):
    ends(installed.python, "pass", KVPATCH="banana")
    done = run(installed.python, "-c", "import vllm", KVPATCH="banana")
    assert done.code == 1
    assert done.err.startswith("kvpatch refuses to start vLLM: KVPATCH=banana is not a known value")
    assert done.err.count("\n") == 1


def test_uninstalling_removes_everything(fresh, ends):
    fresh.pip("uninstall", "--quiet", "--yes", "kvpatch")
    left = {path.name for path in fresh.site.iterdir() if "kvpatch" in path.name}
    assert left == set()
    assert not fresh.python.with_name("kvpatch").exists()
    ends(fresh.python, "import vllm", out="vllm itself\n", KVPATCH="1")


def test_a_missing_requirement_refuses_vllm_only(fresh, ends, run):
    (fresh.site / "wrapt").unlink()
    ends(fresh.python, "pass", KVPATCH="1")
    said = (
        "kvpatch refuses to start vLLM: kvpatch itself cannot be imported, because it failed with "
        "ModuleNotFoundError: No module named 'wrapt'; reinstall kvpatch with its requirements, "
        "or set KVPATCH=0. [KVP108]\n"
    )
    ends(fresh.python, "import vllm", 1, err=said, KVPATCH="1")
    done = run(fresh.python, "-m", "kvpatch", "doctor")
    assert (done.code, done.err) == (1, "")
    assert "kvpatch cannot be imported whole (No module named 'wrapt')" in done.out


@pytest.mark.parametrize("lost", ["kvpatch/bootstrap.py", "kvpatch"])
def test_a_broken_installation_refuses_vllm_only(fresh, ends, run, lost):
    path = fresh.site / lost
    path.rename(path.with_name("lost"))
    ends(fresh.python, "pass", KVPATCH="1")
    done = run(fresh.python, "-c", "import vllm", KVPATCH="1")
    missing = lost.removesuffix(".py").replace("/", ".")
    assert (done.code, done.out) == (1, "")
    assert done.last_line == (
        "ImportError: kvpatch refuses to start vLLM: KVPATCH is set but kvpatch cannot be "
        f"imported, because of ModuleNotFoundError: No module named '{missing}'; reinstall "
        "kvpatch, or unset KVPATCH. [KVP108]"
    )


def test_a_kvpatch_that_ends_at_its_import_ends_no_other_program(fresh, ends, run):
    (fresh.site / "kvpatch/__init__.py").write_text("raise SystemExit(3)")
    ends(fresh.python, "print('ran')", out="ran\n", KVPATCH="1")
    done = run(fresh.python, "-c", "import vllm", KVPATCH="1")
    assert done.code == 1
    assert "kvpatch cannot be imported, because of SystemExit: 3;" in done.last_line


def test_the_wheel_holds_the_startup_files_once(wheel):
    paths = zipfile.ZipFile(wheel).namelist()
    assert len(paths) == len(set(paths))
    assert sorted(path for path in paths if path.rpartition("/")[2] in STARTUP) == sorted(STARTUP)


def test_the_command_is_there_and_finds_what_this_environment_lacks(installed, run):
    done = run(installed.python.with_name("kvpatch"), "doctor", KVPATCH="1")
    assert (done.code, done.err) == (1, "")
    assert "ok      it fires in" in done.out
    assert "vllm 0.17.9 is not a validated release" in done.out
    assert "kvcached is not installed as a distribution" in done.out


LOAD_PLUGINS = """
import vllm
from importlib.metadata import entry_points
for plugin in entry_points(group="vllm.general_plugins"):
    plugin.load()()  # as vllm does, without a net under the call
print("started")
"""
NOT_FIRED = "kvpatch refuses to start vLLM: KVPATCH is set but its startup file did not run in "


@pytest.fixture(scope="session")
def target(tmp_path_factory, wheel):
    """kvpatch where ``pip install --target`` puts it: on the path, and no startup file read."""
    folder = tmp_path_factory.mktemp("target")
    command = ["install", "--quiet", "--no-deps", "--no-index", "--target", folder, wheel]
    subprocess.run([sys.executable, "-m", "pip", *command], check=True)
    return folder


@pytest.mark.parametrize("flags", [(), ("-S",)], ids=["target folder", "without site"])
def test_vllm_is_stopped_when_the_startup_file_did_not_run(bare, target, run, flags):
    path = f"{target}:{bare.site}"
    done = run(bare.python, *flags, "-c", LOAD_PLUGINS, KVPATCH="1", PYTHONPATH=path)
    assert (done.code, done.out) == (1, "vllm itself\n")
    assert done.last_line.startswith(f"RuntimeError: {NOT_FIRED}{bare.python}, because")
    assert done.last_line.endswith("or unset KVPATCH. [KVP109]")


@pytest.mark.parametrize("environment", UNSET, ids=str)
def test_off_the_plugin_says_nothing_and_imports_nothing(bare, target, run, environment):
    code = LOAD_PLUGINS + "import sys; print([n for n in sys.modules if n.startswith('kvpatch')])"
    path = f"{target}:{bare.site}"
    done = run(bare.python, "-S", "-c", code, PYTHONPATH=path, **environment)
    assert (done.code, done.err) == (0, "")
    assert done.out == "vllm itself\nstarted\n['kvpatch_startup']\n"
