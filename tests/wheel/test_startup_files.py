"""What the installed package does to the start of every Python."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvpatch.refusal import VERIFY_IT

ROOT = Path(__file__).parents[2]
STARTUP = {"kvpatch-init.pth", "kvpatch-init.start", "kvpatch_startup.py"}
NOT_VALIDATED = (
    "kvpatch refuses to start vLLM: vllm 0.17.9 is not a validated release, because it "
    "has not passed the full engine test matrix; install vllm "
    "0.17.1 or another release that `kvpatch matrix` shows, set "
    f"KVPATCH_ALLOW_VLLM=0.17.9 to try it all the same, or set KVPATCH=0{VERIFY_IT}. [KVP107]"
)


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


def test_both_startup_files_name_the_same_importable_function(installed, run):
    (pth,) = (installed.site / "kvpatch-init.pth").read_text().splitlines()
    assert pth.startswith("import os; ")
    assert "import kvpatch_startup" in pth
    assert "kvpatch_startup.start()" in pth
    lines = (installed.site / "kvpatch-init.start").read_text().splitlines()
    (entry,) = [line for line in lines if line and not line.startswith("#")]
    assert entry == "kvpatch_startup:start"
    code = "from pkgutil import resolve_name; import sys; print(resolve_name(sys.argv[1])())"
    done = run(installed.python, "-c", code, entry)
    assert (done.code, done.out, done.err) == (0, "None\n", "")


@pytest.mark.parametrize("flags", [(), ("-I",), ("-E",), ("-s",), ("-O",)], ids=" ".join)
@pytest.mark.parametrize("value", [None, "", "0", "false"], ids=repr)
def test_off_adds_nothing(installed, modules, tmp_path, value, flags):
    environment = {} if value is None else {"KVPATCH": value}
    before = modules(without_startup(installed, tmp_path), *flags, **environment)
    assert modules(installed.python, *flags, **environment) - before == set()


@pytest.mark.parametrize("value", [None, "", "0", "false"], ids=repr)
def test_off_a_startup_file_without_its_stub_says_nothing(fresh, run, value):
    """Python prints eight lines for it, in every process."""
    (fresh.site / "kvpatch_startup.py").unlink()
    done = run(fresh.python, "-c", "pass", **({} if value is None else {"KVPATCH": value}))
    assert (done.code, done.out, done.err) == (0, "", "")


def test_on_a_startup_file_without_its_stub_stands_before_vllm(fresh, run):
    (fresh.site / "kvpatch_startup.py").unlink()
    assert run(fresh.python, "-c", "pass", KVPATCH="1").err == ""
    done = run(fresh.python, "-c", "import vllm", KVPATCH="1")
    assert (done.code, done.out, done.err) == (1, "", NOT_VALIDATED + "\n")


@pytest.mark.parametrize("flags", [(), ("-I",), ("-E",), ("-s",), ("-O",)], ids=" ".join)
def test_on_adds_only_what_waits_for_vllm(installed, modules, tmp_path, flags):
    before = modules(without_startup(installed, tmp_path), *flags, KVPATCH="1")
    ours = {"kvpatch", "kvpatch.bootstrap", "kvpatch.environ", "kvpatch.version"}
    added = {"kvpatch_startup", "__future__"} | ours
    assert modules(installed.python, *flags, KVPATCH="1") - before == added


@pytest.mark.parametrize("flags", [(), ("-I",), ("-E",), ("-s",), ("-O",)], ids=" ".join)
def test_on_stands_before_vllm(installed, run, flags):
    done = run(installed.python, *flags, "-c", "import vllm", KVPATCH="1")
    assert (done.code, done.out, done.err) == (1, "", NOT_VALIDATED + "\n")


@pytest.mark.parametrize("value", [None, "", "0"], ids=repr)
def test_off_leaves_vllm_alone(installed, run, value):
    environment = {} if value is None else {"KVPATCH": value}
    done = run(installed.python, "-c", "import vllm", **environment)
    assert (done.code, done.out, done.err) == (0, "vllm itself\n", "")


def test_without_site_only_an_import_switches_on(installed, modules, run):
    """-S reads no startup files and leaves site-packages to the script."""
    assert not any("kvpatch" in name for name in modules(installed.python, "-S", KVPATCH="1"))
    path = f"import sys; sys.path += {[str(installed.site), str(ROOT)]}\n"
    done = run(installed.python, "-S", "-c", path + "import vllm", KVPATCH="1")
    assert (done.code, done.out, done.err) == (0, "vllm itself\n", "")
    done = run(installed.python, "-S", "-c", path + "import kvpatch, vllm")
    assert (done.code, done.out, done.err) == (1, "", NOT_VALIDATED + "\n")


def test_a_value_that_means_nothing_disturbs_nothing_but_vllm(installed, run):
    done = run(installed.python, "-c", "pass", KVPATCH="banana")
    assert (done.code, done.out, done.err) == (0, "", "")
    done = run(installed.python, "-c", "import vllm", KVPATCH="banana")
    assert done.code == 1
    assert done.err.startswith("kvpatch refuses to start vLLM: KVPATCH=banana is not a known value")
    assert done.err.count("\n") == 1


def test_uninstalling_removes_everything(fresh, run):
    fresh.pip("uninstall", "--quiet", "--yes", "kvpatch")
    left = {path.name for path in fresh.site.iterdir() if "kvpatch" in path.name}
    assert left == set()
    assert not fresh.python.with_name("kvpatch").exists()
    done = run(fresh.python, "-c", "import vllm", KVPATCH="1")
    assert (done.code, done.out, done.err) == (0, "vllm itself\n", "")


def test_a_missing_requirement_refuses_vllm_only(fresh, run):
    (fresh.site / "wrapt").unlink()
    done = run(fresh.python, "-c", "pass", KVPATCH="1")
    assert (done.code, done.out, done.err) == (0, "", "")
    done = run(fresh.python, "-c", "import vllm", KVPATCH="1")
    assert (done.code, done.out, done.err) == (
        1,
        "",
        "kvpatch refuses to start vLLM: kvpatch itself cannot be imported, because it failed with "
        "ModuleNotFoundError: No module named 'wrapt'; reinstall kvpatch with its requirements, "
        "or set KVPATCH=0. [KVP108]\n",
    )


@pytest.mark.parametrize("lost", ["kvpatch/bootstrap.py", "kvpatch"])
def test_a_broken_installation_refuses_vllm_only(fresh, run, lost):
    path = fresh.site / lost
    path.rename(path.with_name("lost"))
    done = run(fresh.python, "-c", "pass", KVPATCH="1")
    assert (done.code, done.out, done.err) == (0, "", "")
    done = run(fresh.python, "-c", "import vllm", KVPATCH="1")
    missing = lost.removesuffix(".py").replace("/", ".")
    assert (done.code, done.out) == (1, "")
    assert done.last_line == (
        "ImportError: kvpatch refuses to start vLLM: KVPATCH is set but kvpatch cannot be "
        f"imported, because of ModuleNotFoundError: No module named '{missing}'; reinstall "
        "kvpatch, or unset KVPATCH. [KVP108]"
    )


def test_a_kvpatch_that_ends_at_its_import_ends_no_other_program(fresh, run):
    (fresh.site / "kvpatch/__init__.py").write_text("raise SystemExit(3)")
    done = run(fresh.python, "-c", "print('ran')", KVPATCH="1")
    assert (done.code, done.out, done.err) == (0, "ran\n", "")
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


def test_doctor_without_a_requirement_says_so(fresh, run):
    (fresh.site / "wrapt").unlink()
    done = run(fresh.python, "-m", "kvpatch", "doctor")
    assert (done.code, done.err) == (1, "")
    assert "kvpatch cannot be imported whole (No module named 'wrapt')" in done.out


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


@pytest.mark.parametrize("value", [None, "", "0"], ids=repr)
def test_off_the_plugin_says_nothing_and_imports_nothing(bare, target, run, value):
    set_to = {} if value is None else {"KVPATCH": value}
    code = LOAD_PLUGINS + "import sys; print([n for n in sys.modules if n.startswith('kvpatch')])"
    path = f"{target}:{bare.site}"
    done = run(bare.python, "-S", "-c", code, PYTHONPATH=path, **set_to)
    assert (done.code, done.err) == (0, "")
    assert done.out == "vllm itself\nstarted\n['kvpatch_startup']\n"
