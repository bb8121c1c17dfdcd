"""harness.serve's ``Server`` on a stand-in for ``vllm serve``: what it reads, stops and removes."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

pytest.importorskip("httpx")

import harness.serve
from harness.console import HarnessError
from harness.serve import Metrics, Server

# Answers as vLLM does, has a child that ignores SIGINT, and leaves shared memory behind.
VLLM = """
import json, mmap, os, signal, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

if os.environ.get("FAKE_ENDS"):
    sys.exit("ImportError: kvpatch refuses to start vLLM: a, because b; c.")
name = os.environ["KVCACHED_IPC_NAME"]
for path in (f"/dev/shm/{name}", f"/dev/shm/psm_{os.getpid()}"):
    with open(path, "wb+") as file:
        file.write(bytes(4096))
        file.flush()
        kept = mmap.mmap(file.fileno(), 4096) if "psm" in path else None
child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child])
print("kvpatch 0.1.0: pid 1, KV on elastic memory: yes", sys.argv[3:], flush=True)
METRICS = '''# TYPE vllm:loads counter
vllm:loads_total{engine="0",kind="a"} 2.0
vllm:loads_total{engine="1",kind="a"} 3.0
vllm:loads_total{engine="0",kind="b"} 1e+01
vllm:loads_created{engine="0",kind="b"} 1.79e+09
'''
refusals = 1

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(METRICS if self.path == "/metrics" else "")
    def do_POST(self):
        global refusals
        asked = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/reset_prefix_cache"):
            refusals -= 1
            self.answer(json.dumps({"success": refusals < 0}))
        elif self.path == "/collective_rpc":
            self.answer(json.dumps({"results": [json.loads(asked)["method"]]}))
        else:
            tokens = json.loads(asked)["prompt"][::-1]
            choice = {"token_ids": tokens, "logprobs": {"token_logprobs": [-1.0]}}
            self.answer(json.dumps({"choices": [choice]}))
    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *_):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
with __import__("contextlib").suppress(KeyboardInterrupt):
    server.serve_forever()
"""
NAME = f"kvpatch-test-serve-{os.getpid()}"


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Make a server of the stand-in."""
    (tmp_path / "vllm").write_text(VLLM)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(harness.serve, "STOP_SECONDS", 0.5)

    def serve(arguments=None, environment=None, **options) -> Server:
        own = {"PATH": os.environ["PATH"], "KVCACHED_IPC_NAME": NAME, **(environment or {})}
        return Server(Path("model"), arguments or {}, own, tmp_path, **options)

    return serve


def left() -> list[Path]:
    return list(Path("/dev/shm").glob(f"{NAME}*"))


def test_it_answers_and_leaves_nothing(serve):
    config = {"kv_connector": "OffloadingConnector"}
    arguments = {
        "block_size": 32,
        "enforce-eager": True,
        "seed": None,
        "kv_transfer_config": config,
    }
    with serve(arguments) as server:
        assert server.complete({"tokens": [1, 2], "max_tokens": 2})["tokens"] == [2, 1]
        assert server.rpc("look") == ["look"]
        assert server.metric("vllm:loads_total") == 15
        assert server.metric("vllm:loads_total", kind="a") == 5
        assert server.elastic and server.offloads
        server.reset_caches()  # refused once
        assert len(server.processes()) == 2
        assert server.memory() > 0
        segment = Path(f"/dev/shm/psm_{server.process.pid}")
        assert segment.exists() and left()
    assert server.processes() == left() == []
    assert not segment.exists()
    words = server.log[server.log.index("[") :].partition("]")[0]
    for word in ("'--block-size', '32'", "'--enforce-eager', '--kv-transfer-config'"):
        assert word in words
    assert json.dumps(config) in words
    assert "--seed" not in words


def test_what_it_leaves_may_stay(serve):
    with serve(sweep=False) as server:
        segment = Path(f"/dev/shm/psm_{server.process.pid}")
    assert segment.exists() and left()
    for path in (segment, *left()):
        path.unlink()
    assert server.processes() == []


def test_two_start_at_once(serve):
    with serve(wait=False) as one, serve(wait=False, name="other") as other:
        while not (one.ready() and other.ready()):
            time.sleep(0.05)
        assert one.port != other.port


def test_one_that_ends_gives_its_reason(serve):
    with pytest.raises(
        HarnessError, match=r"plain ended during start-up \(exit status 1\): kvpatch r"
    ):
        serve(environment={"FAKE_ENDS": "1"}, name="plain").__enter__()


def test_an_exception_ends_it_as_well(serve):
    server = serve()
    with suppress(KeyError), server:
        raise KeyError
    assert not psutil.pid_exists(server.process.pid)
    assert left() == []


def test_a_series_that_is_not_there_is_0():
    assert Metrics("").total("vllm:nothing") == 0
