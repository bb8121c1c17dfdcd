"""scripts/gpu run: a step that fails, ends or hangs is a row, and the next one runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness import ROOT, provenance
from harness.gpu import seen, steps

# In the place of the steps. What hangs has a child in a session of its own, which an interrupt does
# not end, as an engine has.
FAKES = """
import os, signal, subprocess, sys, time
from pathlib import Path

def right(job, seen):
    seen.check("it holds", True)
    seen.note(options=job.options, model=job.model)

def wrong(job, seen):
    seen.check("it holds", False, "2 of 3")

def nothing(job, seen):
    pass

def fails(job, seen):
    seen.check("so far", True)
    raise ValueError("first\\nlast")

def ends(job, seen):
    print("on its way", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def sleeps(job, seen):
    hangs(job, seen)

def hangs(job, seen):
    seen.note(before="it hung")
    deaf = "import signal, time; signal.signal(2, 1); print(flush=True); time.sleep(99)"
    child = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True, stdout=-1)
    child.stdout.readline()
    seen.note(child=child.pid)
    time.sleep(99)
"""
RUN = """
import sys
from harness.gpu import command, run, steps
names = {names!r}
steps.STEPS = tuple(
    steps.Step(name, "asks " + name, "fakes:" + name, 5 if name == "hangs" else 30, name == "cuda")
    for name in names
)
run.device = lambda: "a GPU"
run.SETTLE = 0.3
sys.argv[0] = "scripts/gpu"
raise SystemExit(command.main())
"""


@pytest.fixture
def ran(tmp_path):
    """Run fake steps; returns the process, and the rows of gpu.json."""
    (tmp_path / "fakes.py").write_text(FAKES)

    def ran(*names, options=(), python=sys.executable, before=""):
        path = os.pathsep.join([str(ROOT / "scripts"), str(ROOT), str(tmp_path)])
        words = ["run", "--python", python, "--output", str(tmp_path / "out"), *options]
        done = subprocess.run(
            [sys.executable, "-c", before + RUN.format(names=names), *words],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        found = tmp_path / "out/gpu.json"
        content = json.loads(found.read_text()) if found.exists() else {}
        return done, {row["step"]: row for row in content.get("steps", ())}

    return ran


def test_all_right(ran, tmp_path):
    done, rows = ran("right", options=["--model", "one", "--", "--enforce-eager", "--seed", "1"])
    assert (done.returncode, done.stderr) == (0, "")
    assert rows["right"]["state"] == "right"
    assert rows["right"]["facts"]["options"] == ["--enforce-eager", "--seed", "1"]
    assert rows["right"]["facts"]["model"] == "one"
    own = json.loads((tmp_path / "out/right.json").read_text())
    assert own.items() <= rows["right"].items()


@pytest.mark.parametrize(
    ("name", "state", "words"),
    [
        ("wrong", "wrong", "it holds: 2 of 3"),
        ("nothing", "not seen", ""),
        ("fails", "not seen", "ValueError: last"),
        ("ends", "not seen", "ended with status -9: on its way"),
        ("missing", "not seen", "AttributeError: module 'fakes' has no attribute 'missing'"),
    ],
)
def test_the_next_step_runs_whatever_became_of_one(ran, name, state, words):
    done, rows = ran(name, "right")
    assert done.returncode == (1 if state == "wrong" else 3), done.stderr
    assert rows[name]["state"] == state
    assert words in [*rows[name]["wrong"], *rows[name]["missing"], ""]
    assert rows["right"]["state"] == "right"


def test_wrong_outweighs_what_was_not_seen(ran):
    assert ran("fails", "wrong", "right")[0].returncode == 1


def test_a_step_past_its_limit_is_ended_with_all_its_processes(ran):
    done, rows = ran("hangs", "right")
    assert done.returncode == 3
    assert rows["hangs"]["seconds"] < 15
    facts = rows["hangs"]["facts"]
    assert rows["hangs"]["missing"][0].startswith("not ended within 5 s: ")
    assert facts["before"] == "it hung"
    assert not Path(f"/proc/{facts['child']}").exists()
    assert rows["right"]["state"] == "right"


def test_a_limit_for_all_steps(ran):
    _, rows = ran("hangs", options=["--seconds", "0.5"])
    assert rows["hangs"]["missing"][0].startswith("not ended within 0 s")


def test_results_are_there_before_the_next_step_has_ended(tmp_path, ran):
    (tmp_path / "out").mkdir()
    _, rows = ran("right", "ends")
    assert list(rows) == ["right", "ends"]
    assert json.loads((tmp_path / "out/right.json").read_text())["state"] == "right"
    assert not list((tmp_path / "out").glob("*.part"))


def test_a_result_of_an_earlier_run_is_not_taken_for_this_ones(tmp_path, ran):
    assert ran("right")[1]["right"]["state"] == "right"
    _, rows = ran("right", python="/bin/false")
    assert rows["right"]["state"] == "not seen"
    assert rows["right"]["missing"] == ["ended with status 1: it printed nothing"]


def test_what_needs_cuda_says_so_on_the_host(ran):
    done, rows = ran("cuda", "right", options=["--host"])
    assert done.returncode == 0
    assert rows["cuda"]["state"] == "needs CUDA"
    assert "cuda          needs CUDA\n" in done.stdout


def test_bad_input_is_one_line(ran):
    done, _ = ran("right", options=["--steps", "right,left"])
    assert done.returncode == 2
    assert done.stderr == "scripts/gpu run: there is no step 'left'; there are right\n"
    done, _ = ran("right", python="/nowhere/python")
    assert done.returncode == 2
    assert done.stderr == "scripts/gpu run: there is no /nowhere/python\n"
    done, _ = ran("right", options=["stray"])
    assert done.returncode == 2
    assert done.stderr == "scripts/gpu run: 'stray' is no option of vllm serve\n"
    done, _ = ran("right", options=["--output", "/dev/null/out"])
    assert done.returncode == 1
    assert done.stderr.startswith("scripts/gpu run: [Errno 20] Not a directory: '/dev/null/out")


def test_an_interrupt_ends_the_step_that_runs(ran, tmp_path):
    before = f"""
import os, signal, threading, time
from pathlib import Path
found = Path({str(tmp_path / "out/sleeps.json")!r})
def interrupt():
    while not found.exists() or "child" not in found.read_text():
        time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGTERM)
threading.Thread(target=interrupt, daemon=True).start()
"""
    done, _ = ran("sleeps", "right", before=before)
    assert done.returncode == 128 + 15
    assert done.stderr == "scripts/gpu run: interrupted by SIGTERM\n"
    child = json.loads((tmp_path / "out/sleeps.json").read_text())["facts"]["child"]
    assert not Path(f"/proc/{child}").exists()


def bare(*words, **environment):
    """Run scripts/gpu with the standard library alone."""
    command = [sys.executable, "-S", str(ROOT / "scripts/gpu"), *map(str, words)]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_without_packages_and_commands(tmp_path):
    done = bare("run", "--host", "--steps", "probe", "--output", tmp_path, PATH="")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "gpu.json").read_text())["commit"] == "unknown"


def test_without_a_gpu_nothing_is_seen(tmp_path):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has one")
    done = bare("run", "--output", tmp_path / "out", PATH="")
    assert done.returncode == 3
    assert done.stdout == "scripts/gpu run: no NVIDIA GPU here; --host runs on the host device\n"
    assert not (tmp_path / "out").exists()


def test_without_git_the_commit_is_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.commit() == "unknown"


def test_the_list_has_every_step_and_what_it_answers():
    lines = bare("run", "--list", PATH="").stdout.splitlines()
    assert [line.split()[0] for line in lines] == [step.name for step in steps.STEPS]
    assert all(step.asks in line for step, line in zip(steps.STEPS, lines, strict=True))


def test_every_step_has_a_function():
    for step in (*steps.STEPS, steps.MORE):
        module, _, name = step.function.partition(":")
        path = ROOT / "scripts" / f"{module.replace('.', '/')}.py"
        assert f"\ndef {name}(job: Job, seen: Seen)" in path.read_text(), step


def test_later_environments_are_verified():
    assert [(one.name, one.python) for one in steps.of(3)[-2:]] == [
        ("release-2", 1),
        ("release-3", 2),
    ]


def test_options_of_vllm_serve_by_name():
    words = ["--a", "--b=1", "--c", "2", "--d-e", "f=g"]
    assert seen.arguments(words) == {"a": True, "b": "1", "c": "2", "d-e": "f=g"}
