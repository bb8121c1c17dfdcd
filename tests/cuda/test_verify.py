"""``kvpatch verify`` on the emulated device, of a command whose refusals only a GPU has.

It sleeps and has a host pool: a right run lifts both refusals, and what only a sleep, or memory
that the pool took back, makes wrong is found.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from harness import ROOT, releases
from harness.cuda import emulated
from harness.engines import plugins
from harness.engines.runs import model_of

RELEASE = releases.newest_built()
LIFTED = ["KVP341", "KVP344", "KVP376"]  # the last is of settings that did not run together
# Pages are small, so that they are unmapped under load, and the pool has several extents.
SETTINGS = {"KVPATCH_HOST_POOL": "256MiB@mine", "PYTHONHASHSEED": "0", "KVPATCH": "0"}
OPTIONS = (
    *("--enforce-eager", "--dtype=bfloat16", "--block-size=32", "--max-model-len=4096"),
    *("--max-num-seqs=8", "--kv-offloading-size=0.25", "--enable-sleep-mode"),
)


def verify(folder: Path, *options: str, plugin: str = "") -> subprocess.CompletedProcess[str]:
    python = emulated.made(RELEASE)
    changes = SETTINGS | {"XDG_DATA_HOME": str(folder / "home")}
    if plugin:
        installed = plugins.install(folder / "plugin", plugin)
        changes["PYTHONPATH"] = os.pathsep.join([installed, str(ROOT / "scripts")])
    serve = [python, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(model_of("llama"))]
    return subprocess.run(
        [
            *(python, "-P", "-m", "kvpatch", "verify", "--logs", folder / "logs", *options, "--"),
            *(*serve, *OPTIONS),
        ],
        env=emulated.environ(RELEASE, folder, **changes),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )


def test_a_sleep_and_a_host_pool_are_verified_and_lifted(tmp_path):
    done = verify(tmp_path)
    assert done.returncode == 0, done.stdout
    (file,) = (tmp_path / "home").rglob("*.json")
    found = json.loads(file.read_text())
    assert (found["verdict"], found["lifted"]) == ("right", LIFTED), done.stdout
    assert found["compared with plain vLLM"]
    assert not emulated.complaints_of(tmp_path).exists(), done.stdout


@pytest.mark.parametrize("plugin", ["flip_what_a_sleep_left", "flip_what_was_taken_back"])
def test_what_a_sleep_or_the_pool_makes_wrong_is_found(tmp_path, plugin):
    done = verify(tmp_path, "--no-plain", plugin=plugin)
    assert done.returncode == 1, done.stdout
    assert "a load brought other bytes than were stored" in done.stdout
    assert "this command stays refused" in done.stdout
