"""When kvpatch is on, and that it leaves every other program alone."""

import shutil

import pytest

from kvpatch.supported import in_ranges, validated

STUB = "import kvpatch_startup; kvpatch_startup.start()\n"
LOADED = "import sys; print(sorted(n for n in ('kvpatch', 'wrapt', 'vllm') if n in sys.modules))\n"


@pytest.mark.parametrize("value", ["", "0", " 0 ", " ", "false", "OFF", "no", None])
def test_off_or_unset_imports_only_the_stub(python, value):
    done = python(STUB + LOADED, **({} if value is None else {"KVPATCH": value}))
    assert (done.code, done.out, done.err) == (0, "[]\n", "")


@pytest.mark.parametrize("value", ["1", "true", "on", "yes", " TRUE ", "On", "banana"])
def test_on_waits_without_importing_anything_else(python, value):
    done = python(STUB + LOADED, KVPATCH=value)
    assert (done.code, done.out, done.err) == (0, "['kvpatch']\n", "")


@pytest.mark.parametrize("value", ["1", "true", "on", "yes", " TRUE ", "On"])
def test_on_patches_vllm(python, value):
    code = "import fake_patches, vllm.serving; print(vllm.serving.Server().serve('it'))"
    done = python(STUB + code, KVPATCH=value)
    assert (done.code, done.out, done.err) == (0, "patched it\n", "")


@pytest.mark.parametrize("value", ["banana", "none", "2", "1 1"])
def test_any_other_value_refuses_vllm_in_one_line(python, value):
    done = python(STUB + "import vllm; print('imported')", KVPATCH=value)
    assert done.code == 1
    assert done.out == ""
    assert done.err == (
        f"kvpatch refuses to start vLLM: KVPATCH={value} is not a known value, because "
        "it would be unclear whether kvpatch is on; set KVPATCH to 1, true, on or yes to switch "
        "it on, or to 0, false, off or no (or leave it unset) to switch it off. [KVP101]\n"
    )


def test_a_variable_that_nothing_reads_is_a_warning_at_start(python):
    code = STUB + "import fake_patches, vllm.serving"
    done = python(code, KVPATCH="1", KVPATCH_HOSTPOOL="64GiB", KVPATCH_ELSE="a")
    assert done.code == 0
    assert done.err == (
        "kvpatch: KVPATCH_ELSE is set, and kvpatch has no such variable\n"
        "kvpatch: KVPATCH_HOSTPOOL is set, and kvpatch has no such variable; did you mean "
        "KVPATCH_HOST_POOL?\n"
    )
    assert python(code, KVPATCH="0", KVPATCH_HOSTPOOL="64GiB").err == ""


def test_it_is_said_once_for_all_processes_of_an_engine(python):
    code = """
import fake_patches, multiprocessing, vllm.serving

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=int)
    child.start()
    child.join()
"""
    assert python(STUB + code, KVPATCH="1", KVPATCH_ELSE="a").err.count("KVPATCH_ELSE") == 1


@pytest.mark.parametrize("value", ["banana", "1"])
def test_asking_whether_vllm_is_there_is_answered(python, value):
    code = "import importlib.util; print(importlib.util.find_spec('vllm').origin)"
    done = python(STUB + code, KVPATCH=value)
    assert done.code == 0
    assert done.out.endswith("/fakes/vllm/__init__.py\n")
    assert done.err == ""


@pytest.mark.parametrize("value", ["banana", "1"])
def test_a_program_with_vllm_as_an_option_goes_on(python, fakes, value):
    shutil.rmtree(fakes / "vllm")
    code = "try:\n  import vllm\nexcept ImportError as error:\n  print(type(error).__name__)"
    done = python(STUB + code, KVPATCH=value)
    assert (done.code, done.out, done.err) == (0, "ModuleNotFoundError\n", "")


def test_a_finder_without_find_spec_is_skipped(python, fakes):
    (fakes / "vllm").rename(fakes / "elsewhere")
    code = """
import importlib.util, sys
class Old:
    def find_module(self, name, path=None):
        return None
sys.meta_path.insert(0, Old())
print(importlib.util.find_spec("vllm"))
"""
    done = python(STUB + code, KVPATCH="1")
    assert (done.code, done.out, done.err) == (0, "None\n", "")


def test_vllm_missing_is_one_sentence_when_nobody_catches_it(python, fakes):
    (fakes / "vllm").rename(fakes / "elsewhere")
    done = python(STUB + "import vllm", KVPATCH="1")
    assert done.code == 1
    assert done.err == (
        "kvpatch refuses to start vLLM: vllm is not installed in this environment, because "
        f"kvpatch is on and patches nothing but vllm {in_ranges(validated())}; install "
        "it with pip, or set KVPATCH=0. [KVP112]\n"
    )


def test_other_errors_keep_their_traceback(python):
    done = python(STUB + "import fake_patches, vllm\nimport nothing_of_that_name", KVPATCH="1")
    assert done.err.startswith("Traceback")
    assert done.last_line == "ModuleNotFoundError: No module named 'nothing_of_that_name'"


def test_importing_kvpatch_switches_on_here_and_in_children(python):
    code = """
import os, subprocess, sys
import kvpatch, fake_patches, vllm.serving
print(os.environ["KVPATCH"], vllm.serving.Server().serve("here"), flush=True)
child = "import kvpatch_startup; kvpatch_startup.start(); import fake_patches, vllm.serving\\n"
child += "print(vllm.serving.Server().serve('in a child'))"
subprocess.run([sys.executable, "-S", "-c", child], check=True)
"""
    done = python(code)
    assert (done.code, done.out) == (0, "1 patched here\npatched in a child\n")


@pytest.mark.parametrize("value", ["0", " 0", "false", "off", "No"])
def test_zero_wins_over_the_import(python, value):
    code = "import kvpatch, os, vllm.serving; print(vllm.serving.Server().serve('it'), os.environ)"
    done = python(code, KVPATCH=value)
    assert done.code == 0
    assert done.out.startswith("it ")
    assert "ENABLE_KVCACHED" not in done.out
    assert f"'KVPATCH': '{value}'" in done.out


def test_zero_set_by_the_program_before_vllm_wins(python):
    code = "import kvpatch, os; os.environ['KVPATCH'] = '0'\n"
    code += "import vllm.serving; print(vllm.serving.Server().serve('it'))"
    assert python(code).out == "it\n"


def test_importing_kvpatch_twice_patches_once(python):
    code = """
import importlib, kvpatch, fake_patches
importlib.reload(kvpatch)
import vllm.serving
importlib.reload(vllm)
print(vllm.serving.Server().serve("it"))
"""
    assert python(STUB + code, KVPATCH="1").out == "patched it\n"


def test_importing_kvpatch_after_vllm_is_an_error(python):
    done = python("import vllm, kvpatch")
    assert done.code == 1
    assert done.last_line == (
        "ImportError: kvpatch was imported after vllm, when it can no longer patch it; import "
        "kvpatch first, or set KVPATCH=1 in the environment, or set KVPATCH=0 to leave vllm as "
        "it is. [KVP109]"
    )
    assert python("import vllm, kvpatch", KVPATCH="0").code == 0


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("first", ["", "import vllm.serving"], ids=["before", "after"])
def test_children_are_patched(python, method, first):
    code = f"""
import multiprocessing
import kvpatch, fake_patches
{first}
def child():
    import vllm.serving
    print(vllm.serving.Server().serve("in a child"), flush=True)
if __name__ == "__main__":
    process = multiprocessing.get_context("{method}").Process(target=child)
    process.start()
    process.join()
    print(process.exitcode)
"""
    done = python(code)
    assert (done.out, done.err) == ("patched in a child\n0\n", "")


def test_kvcached_is_switched_on_unless_the_operator_did(python):
    code = "import fake_patches, os, vllm\n"
    code += "print(os.environ['ENABLE_KVCACHED'], os.environ['KVCACHED_AUTOPATCH'])"
    assert python(STUB + code, KVPATCH="1").out == "1 1\n"
    assert python(STUB + code, KVPATCH="1", ENABLE_KVCACHED="").out == "1 1\n"
    assert python(STUB + code, KVPATCH="1", ENABLE_KVCACHED="TRUE").out == "TRUE 1\n"


def test_the_loader_that_vllm_keeps_is_its_own(python):
    code = "import kvpatch, fake_patches, vllm\n"
    code += "print(type(vllm.__loader__).__name__, type(vllm.__spec__.loader).__name__)"
    assert python(code).out == "SourceFileLoader SourceFileLoader\n"


@pytest.mark.parametrize(
    ("module", "text", "sentence"),
    [
        (
            "kvpatch",
            "raise OSError('half written')",
            "ImportError: kvpatch refuses to start vLLM: KVPATCH is set but kvpatch cannot be "
            "imported, because of OSError: half written; reinstall kvpatch, or unset KVPATCH. "
            "[KVP108]",
        ),
        (
            "wrapt",
            "raise ModuleNotFoundError(\"No module named 'wrapt'\")",
            "kvpatch refuses to start vLLM: kvpatch itself cannot be imported, because it failed "
            "with ModuleNotFoundError: No module named 'wrapt'; reinstall kvpatch with its "
            "requirements, or set KVPATCH=0. [KVP108]",
        ),
    ],
)
def test_a_kvpatch_that_cannot_be_imported_refuses_only_vllm(python, fakes, module, text, sentence):
    (fakes / f"{module}.py").write_text(text)
    assert python(STUB, KVPATCH="1").err == ""
    done = python(STUB + "import vllm", KVPATCH="1")
    assert (done.code, done.last_line) == (1, sentence)
    assert module == "kvpatch" or done.err == f"{sentence}\n"
    found = "import importlib.util; print(importlib.util.find_spec('vllm') is not None)"
    assert python(STUB + found, KVPATCH="1").out == "True\n"
