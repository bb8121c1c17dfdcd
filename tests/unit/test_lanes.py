"""The lanes of the tests, and that this one needs neither torch nor vllm."""

import ast
import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TEST = """def test_it(request):
    print(request.path.parent.name, [mark.name for mark in request.node.iter_markers()])
"""


@pytest.fixture
def collect(run, tmp_path):
    """Run pytest on one test at each of some places under a copy of tests/."""

    def collect(*places, options=()):
        tests = tmp_path / "tests"
        for place in places:
            path = tests / place
            path.parent.mkdir(parents=True)
            path.write_text(TEST)
        shutil.copy(TESTS / "conftest.py", tests)
        shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
        command = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "--rootdir", tmp_path)
        return run(sys.executable, *command, "-c", tmp_path / "pyproject.toml", tests, *options)

    return collect


LANES = "unit,wheel,refusals,engine,faults,long,ascend,gpu-start,cuda,npu,versions,upstream,objects"


def test_a_test_carries_the_mark_of_its_lane(collect):
    done = collect(*(f"{lane}/test_of_{lane}.py" for lane in LANES.split(",")))
    assert done.code == 0
    marked = dict(re.findall(r"([\w-]+) (\[.*\])$", done.out, re.MULTILINE))
    assert marked == {lane: f"['{lane}']" for lane in LANES.split(",")}


@pytest.mark.parametrize("place", ["test_it.py", "other/test_it.py", "unit/wheel/test_it.py"])
def test_a_test_outside_exactly_one_lane_fails_the_collection(collect, place):
    done = collect(place)
    assert done.code == pytest.ExitCode.USAGE_ERROR
    assert f"is in no lane: put it in one of tests/{{{LANES}}}" in done.err


def test_a_file_that_does_not_begin_in_time_is_not_run_and_named(collect):
    done = collect("unit/test_it.py", options=("-p", "harness.begun_by", "--begun-by", "-1"))
    assert done.code == 0
    assert "1 skipped" in done.out
    assert "NOT RUN: tests/unit/test_it.py, as this machine is slow" in done.out


def test_the_longest_files_come_first_as_recorded_and_new_ones_before_them(collect, tmp_path):
    durations = tmp_path / "tests/durations.json"
    durations.parent.mkdir()
    files = [f"tests/{lane}/test_it_{lane}.py" for lane in ("engine", "wheel", "unit")]
    durations.write_text(json.dumps({files[1]: 5, files[2]: 1, "tests/unit/test_gone.py": 9}))
    places = (file.removeprefix("tests/") for file in sorted(files))
    done = collect(*places, options=("--record-durations",))
    assert re.findall(r"(\w+) \['", done.out) == ["engine", "wheel", "unit"]
    assert json.loads(durations.read_text()) == dict.fromkeys(files, 0)


def test_a_lane_is_run_by_default_or_by_ci_or_takes_what_is_made_on_demand():
    lanes = set(runpy.run_path(str(TESTS / "conftest.py"))["LANES"])
    command = (TESTS.parent / "scripts/test").read_text()
    default = set(re.findall(r"lanes=\(tests/\{(.+)\}\)", command)[0].split(","))
    assert default == {"unit", "wheel", "refusals", "engine"}
    command = (TESTS.parent / ".ci/run").read_text()
    named = set(" ".join(re.findall(r"lanes\+?=\(([a-z -]+)\)", command)).split())
    assert named == {"faults", "long", "ascend", "gpu-start"}
    assert lanes - default - named == {"cuda", "npu", "versions", "upstream", "objects"}


def test_the_unit_lane_needs_no_torch_and_no_vllm(run):
    imports = set()
    for path in (TESTS / "unit").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                imports |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imports |= {f"{node.module}.{alias.name}" for alias in node.names}
                imports |= {node.module}
    modules = sorted(name for name in imports if name.startswith("kvpatch"))
    assert "kvpatch.patches.elastic_memory.configuration" in modules
    code = f"""
import importlib, sys
for name in {modules}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        assert error.name.startswith("kvpatch."), error
print([name for name in ("torch", "vllm", "kvcached") if name in sys.modules])
"""
    done = run(sys.executable, "-c", code, KVPATCH="0")
    assert (done.out, done.err) == ("[]\n", "")
