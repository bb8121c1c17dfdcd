"""The engines of one data parallel server: their names, in the processes that vLLM starts."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvpatch.control import protocol
from kvpatch.upstream import kvcached_api

# As vLLM starts its engines, with a worker that each of them starts.
RANKS = """
import json, multiprocessing, os, sys
from types import SimpleNamespace

from kvpatch.patches.data_parallel.name import named_by_rank
from kvpatch.patches.elastic_memory import ipc_name

ipc_name.give_name()
from kvcached import utils

class EngineCoreProc:
    @staticmethod
    def run_engine_core(*args, dp_rank: int = 0, local_dp_rank: int = 0, **kwargs):
        names = utils.DEFAULT_IPC_NAME, os.environ[ipc_name.NAME], os.environ.get(ipc_name._GIVEN)
        context = multiprocessing.get_context(kwargs["method"])
        queue = context.Queue()
        worker = context.Process(target=in_worker, args=(queue,))
        worker.start()
        kwargs["queue"].put([dp_rank, local_dp_rank, *names, queue.get()])
        worker.join()

def in_worker(queue):
    queue.put(utils.DEFAULT_IPC_NAME)

EngineCoreProc.run_engine_core = named_by_rank(vars(EngineCoreProc)["run_engine_core"])

if __name__ == "__main__":
    method, size, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    context = multiprocessing.get_context(method)
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=size))
    found = []
    for rank in range(first, first + 2):
        queue = context.Queue()
        given = {"vllm_config": config, "queue": queue, "method": method}
        ranks = {"dp_rank": rank, "local_dp_rank": rank - first} if size > 1 or first else {}
        engine = context.Process(target=EngineCoreProc.run_engine_core, kwargs=given | ranks)
        engine.start()
        found.append(queue.get(timeout=60))
        engine.join()
    print(json.dumps([os.environ[ipc_name.NAME], utils.DEFAULT_IPC_NAME, found]))
"""
# In the place of kvcached, which takes seconds to import: when it reads its name.
UTILS = """
import os
DEFAULT_IPC_NAME = os.environ["KVCACHED_IPC_NAME"]
"""


@pytest.fixture
def started(tmp_path):
    """Start engines; return the name of their server, and what each of them has."""

    def started(method, size, first=0, **environment):
        script = tmp_path / "ranks.py"
        script.write_text(RANKS)
        (tmp_path / "kvcached").mkdir()
        (tmp_path / "kvcached/__init__.py").touch()
        (tmp_path / "kvcached/utils.py").write_text(UTILS)
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("KVPATCH", "KVCACHED"))}
        ended = subprocess.run(
            [sys.executable, script, method, str(size), str(first)],
            env=kept | {"KVPATCH": "0"} | environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return started


@pytest.mark.parametrize("method", ["spawn", "fork"])
@pytest.mark.parametrize("given", [{}, {"KVCACHED_IPC_NAME": "chat"}])
def test_each_rank_and_its_workers_have_a_name_of_their_own(started, method, given):
    server, here, engines = started(method, 2, **given)
    assert server == here == given.get("KVCACHED_IPC_NAME", server)
    for rank, (global_rank, local_rank, *names) in enumerate(engines):
        assert (global_rank, local_rank) == (rank, rank)
        # Also kvpatch's own variable: nobody starts an engine of this name again.
        assert names == [f"{server}-dp{rank}"] * 4


def test_a_rank_is_numbered_as_vllm_numbers_it_in_all_of_its_server(started):
    server, _, engines = started("spawn", 1, first=2, KVCACHED_IPC_NAME="chat")
    assert [found[:3] for found in engines] == [[2, 0, "chat-dp2"], [3, 1, "chat-dp3"]]
    assert server == "chat"


def test_an_engine_without_ranks_keeps_the_name_of_its_server(started):
    _, _, (engine, _) = started("spawn", 1, KVCACHED_IPC_NAME="chat")
    assert engine[2:] == ["chat", "chat", None, "chat"]


def test_long_names_stay_different_where_kvcached_cuts_them():
    pytest.importorskip("kvcached")  # scripts/pythons is without
    from kvcached.utils import _sanitize_segment

    server = "x" * protocol.LONGEST_NAME
    names = [protocol.name_of_rank(server, rank) for rank in (0, 1, 10)]
    assert len(set(names)) == 3
    assert [_sanitize_segment(name) for name in names] == names
    assert names[2].endswith("x-dp10")
    assert all(protocol.is_rank_of(name, server) for name in names)


@pytest.mark.parametrize(
    ("name", "server", "is_rank"),
    [
        ("chat-dp0", "chat", True),
        ("chat-dp12", "chat", True),
        ("chat", "chat", False),
        ("chat-dp", "chat", False),
        ("chat-dpx", "chat", False),
        ("chat-dp0", "cha", False),
        ("chat-dp0-dp1", "chat-dp0", True),
        ("chat-dp0-dp1", "chat", False),
    ],
)
def test_whose_rank_a_name_is(name, server, is_rank):
    assert protocol.is_rank_of(name, server) is is_rank


def test_no_other_module_of_kvcached_keeps_a_copy_of_the_name():
    """What is read from kvcached.utils when a function runs is read anew."""
    pytest.importorskip("kvcached")  # scripts/pythons is without
    folder = Path(importlib.util.find_spec("kvcached").submodule_search_locations[0])
    copies, folders = set(), set()
    for path in folder.rglob("*.py"):
        module = ".".join(["kvcached", *path.relative_to(folder).with_suffix("").parts])
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                copies |= {module for one in node.names if one.name == "DEFAULT_IPC_NAME"}
            elif isinstance(node, ast.Assign) and "get_tp_socket_dir()" in ast.unparse(node.value):
                folders.add((module, ast.unparse(node.targets[0])))
    assert copies == set(kvcached_api._HAVE_THE_NAME)
    assert folders == {("kvcached.tp_ipc_util", "SOCKET_DIR")}


def test_modules_that_were_imported_before_have_the_new_name(monkeypatch):
    pytest.importorskip("kvcached")  # scripts/pythons is without
    from kvcached import utils

    copies = {
        name: SimpleNamespace(DEFAULT_IPC_NAME="chat") for name in kvcached_api._HAVE_THE_NAME
    }
    sockets = SimpleNamespace(SOCKET_DIR="of chat")
    for name, module in {**copies, "kvcached.tp_ipc_util": sockets}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(utils, "DEFAULT_IPC_NAME", "chat")
    kvcached_api.rename("chat-dp1")
    assert kvcached_api.name() == "chat-dp1"
    assert {one.DEFAULT_IPC_NAME for one in copies.values()} == {"chat-dp1"}
    assert "kvcached-tp-chat-dp1-" in sockets.SOCKET_DIR
