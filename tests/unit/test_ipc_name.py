"""Which processes share a name of kvcached, and that only one engine runs under one."""

import os
import subprocess
import sys

import pytest

from kvpatch.patches.elastic_memory import ipc_name

NAMES = """
import multiprocessing, os, subprocess, sys
from kvpatch.patches.elastic_memory import ipc_name

def name(queue=None):
    ipc_name.give_name()
    found = os.environ["KVCACHED_IPC_NAME"]
    if queue is None:
        return found
    queue.put(found)

def of_child(method):
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=name, args=(queue,))
    child.start()
    found = queue.get()
    child.join()
    return found

if __name__ == "__main__":
    code = "from kvpatch.patches.elastic_memory import ipc_name; import os; ipc_name.give_name(); "
    code += "print(os.environ['KVCACHED_IPC_NAME'])"
    program = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    before = program.stdout.strip()
    print(before, name(), of_child("fork"), of_child("spawn"), end=" ")
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
else:
    assert os.environ["KVCACHED_IPC_NAME"] == name()  # while a spawned child imports
"""


def names(tmp_path, **environment):
    script = tmp_path / "names.py"
    script.write_text(NAMES)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVPATCH", "KVCACHED"))}
    ended = subprocess.run(
        [sys.executable, script],
        env=kept | {"KVPATCH": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


def test_vllms_processes_share_a_name_and_programs_do_not(tmp_path):
    before, own, forked, spawned, program = names(tmp_path)
    assert own == forked == spawned
    assert len({before, own, program}) == 3
    assert own.startswith("kvcached_vLLM_")


def test_an_operators_name_stays(tmp_path):
    assert names(tmp_path, KVCACHED_IPC_NAME="mine") == ["mine"] * 5


@pytest.mark.parametrize("child", [True, False], ids=["vLLM's process", "program"])
def test_a_process_without_kvcacheds_name_gets_one(monkeypatch, child):
    """Whoever took it out of the environment, kvpatch's note of it may be left."""
    monkeypatch.setattr(ipc_name, "started_by_multiprocessing", lambda: child)
    monkeypatch.setenv(ipc_name._GIVEN, "kvcached_vLLM_of_another")
    monkeypatch.setenv(ipc_name.NAME, "")
    for forget in (lambda: None, lambda: monkeypatch.delenv(ipc_name.NAME)):
        forget()
        ipc_name.give_name()
        given = os.environ[ipc_name.NAME]
        assert given.startswith(f"kvcached_vLLM_{os.getpid()}_")
        assert os.environ[ipc_name._GIVEN] == given
