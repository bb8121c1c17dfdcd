"""A stand-in for ``vllm serve``: blocks of words, a small device, a tier, and what it publishes.

    python fake_server.py serve MODEL [FLAGS] --host 127.0.0.1 --port PORT

Its faults are named by the variable FAULT. As in an engine, a request computes the blocks that
it finds neither on the device nor in the tier, and the device evicts what was used least.
"""

import json
import os
import random
import signal
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

WORDS = 32  # of a block
BLOCKS = 8  # of a page
SIZE = 100  # bytes of one
PAGES = 1000  # at most
FOLDER = Path(os.environ.get("KVPATCH_VERIFY") or ".")
SLEEPS = "--enable-sleep-mode" in sys.argv
POOLED = bool(os.environ.get("KVPATCH_HOST_POOL"))
POOL: dict[str, Any] = dict.fromkeys(
    ("resident", "ceiling", "floor", "pool", "limit", "evicted"), 0
)
POOL |= {"engines": 1, "coldest": None, "broken": ""}
OURS = os.environ.get("KVPATCH") == "1"
FAULT = os.environ.get("FAULT", "") if OURS else os.environ.get("PLAIN_FAULT", "")


class Cache:
    """The device and the tier."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.device: dict[str, None] = {}  # by prefix, least used first
        self.tier: set[str] = set()
        self.counts = {"stored": 0, "loaded": 0, "unverified": 0}
        self.preempted = 0
        self.slept = False
        self.stuck = 0  # pages that are never given back

    @property
    def limit(self) -> int:
        """The pages that may be used."""
        path = FOLDER / "limit"
        return int(path.read_text()) // (BLOCKS * SIZE) if path.exists() else PAGES

    @property
    def committed(self) -> int:
        """The bytes of the tier in a host pool, as its limit is or was."""
        path = FOLDER / "pool"
        limits = path.read_text().split() if path.exists() else []
        most = [int(one) for one in limits]
        if FAULT == "nothing taken back":
            most = []
        elif FAULT == "nothing given again":
            most = most[:1]
        return min(SIZE * len(self.tier), *most[-1:], 1 << 40)

    @property
    def pages(self) -> int:
        """The pages in use; that of block 0 is one."""
        return 1 + -(-len(self.device) // BLOCKS) + self.stuck

    def take(self, words: list[str]) -> bool:
        """Bring the blocks of a prompt to the device; return whether some were loaded."""
        loaded = False
        with self.lock:
            for end in range(WORDS, len(words) + 1, WORDS):
                prefix = " ".join(words[:end])
                if prefix in self.device:
                    del self.device[prefix]
                elif prefix in self.tier and FAULT != "nothing restored":
                    self.counts["loaded"] += 1
                    loaded = True
                else:
                    self.tier.add(prefix)
                    self.counts["stored"] += 1
                self.device[prefix] = None
                while len(self.device) > (self.limit - 1) * BLOCKS:
                    del self.device[next(iter(self.device))]
        return loaded

    def reset(self) -> None:
        """Empty both."""
        with self.lock:
            self.stuck = self.pages // 2 if FAULT == "memory" else 0
            self.device.clear()
            self.tier.clear()

    def sleep(self) -> None:
        """Empty the device."""
        with self.lock:
            self.slept = True
            self.device.clear()


CACHE = Cache()


def publish() -> Any:
    """Publish the state as an engine does; return what to call when it changed."""
    if not OURS:
        return lambda: None
    from kvpatch.patches.debug.journal import Journal
    from kvpatch.telemetry import status_page

    workers = 2
    journals = [Journal(FOLDER) for _ in range(workers)]
    combination = {
        "versions": {"vllm": "0.32.0", "kvcached": "0.1.6"},
        "code": {},
        "device": "a stand-in",
        "model": {"architecture": "Fake"},
        "flags": {"cache_config.block_size": WORDS, "model_config.enable_sleep_mode": SLEEPS},
    }
    written = {"combination": combination, "workers": workers, "connectors": 1}
    (FOLDER / "combination.json").write_text(json.dumps(written))
    (FOLDER / "lifted").write_text("KVP310\n")
    page = status_page.Writer(os.getpid(), "0")

    def update() -> None:
        silent = FAULT == "a silent worker"
        for number, journal in enumerate(journals):
            counts = CACHE.counts | ({"loaded": 0} if silent and number else {})
            journal.write(counts)
        page.write(
            {
                "elastic": True,
                "roles": ["engine-core"],
                "engine": {
                    "requests": {"running": 0, "waiting": 0},
                    "pool": "pool",
                    "connector": "OffloadingConnector",
                    "host_pool": POOL | {"committed": CACHE.committed} if POOLED else None,
                    "device": {
                        "page_bytes": BLOCKS * SIZE,
                        "mapped_pages": CACHE.pages,
                        "reserved_pages": 0,
                        "total_pages": CACHE.limit,
                    },
                    "fence": {
                        "released": 16,
                        "held_for_plan": 13,
                        "held_for_transfer": 2,
                        "longest_hold": 1,
                        "holding": 0,
                    },
                    "bytes": {
                        "stored": CACHE.counts["stored"] * workers * SIZE,
                        "loaded": CACHE.counts["loaded"] * workers * SIZE,
                    },
                },
            }
        )

    update()
    return update


UPDATE = publish()


class Handler(BaseHTTPRequestHandler):
    """The routes that verify uses."""

    def log_message(self, *_: object) -> None:
        """Be quiet."""

    def answer(self, body: bytes = b"") -> None:
        """Send one answer."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """Health, models, metrics."""
        model = {"id": "fake", "max_model_len": 4096}
        bodies = {
            "/health": "",
            "/v1/models": json.dumps({"data": [model]}),
            "/metrics": f"vllm:num_preemptions_total {CACHE.preempted}\n",
        }
        self.answer(bodies[self.path].encode())

    def do_POST(self) -> None:
        """Reset, and completions."""
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        if self.path.startswith("/reset_prefix_cache"):
            CACHE.reset()
            UPDATE()
            self.answer(b'{"success": true}')
            return
        if self.path.startswith(("/sleep", "/wake_up", "/collective_rpc")):
            if self.path.startswith("/sleep"):
                CACHE.sleep()
            self.answer(b'{"status": "as asked"}')
            return
        violations = {
            "bytes": "a load brought other bytes than were stored",
            "unmapping": "a page is unmapped under a transfer",
        }
        kind, _, since = FAULT.partition(" since ")
        begun = {"a sleep": CACHE.slept, "the pool": (FOLDER / "pool").exists()}
        if kind in violations and CACHE.counts["loaded"] and begun.get(since, True):
            what = f"{violations[kind]}: block 7 of page 1, job 3, request r"
            print(f"kvpatch KVPATCH_DEBUG: {what}", flush=True)
            os._exit(1)
        if FAULT == "an error" and CACHE.counts["loaded"]:
            print("ValueError: an engine has failed", flush=True)
            os._exit(1)
        words = asked["prompt"].split()
        restored = CACHE.take(words)
        if asked["max_tokens"] > 64 and FAULT != "nothing preempted":
            CACHE.preempted += 1
        UPDATE()
        self.send_response(200)
        self.end_headers()
        for chunk in self.chunks(asked, len(words), restored):
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())

    def chunks(self, asked: dict[str, Any], count: int, restored: bool) -> Any:
        """Iterate over the pieces of an answer."""
        source = random.Random(asked["prompt"])
        for position in range(asked["max_tokens"]):
            number, value = source.randrange(1000), -source.random()
            token, other = f"token_id:{number}", f"token_id:{number + 1}"
            top = {token: value, other: value - 2.0}
            if position == 3 and (
                (FAULT == "tokens" and restored) or (FAULT == "a near tie" and count % 2)
            ):
                token = other
            if FAULT == "log-probabilities" and restored:
                value -= 0.5
            if FAULT == "noise" and count % 2:
                top[other] = value - 0.001
                value += 0.004
            top[token] = value if token in top and FAULT != "tokens" else top[token]
            found = {"tokens": [token], "token_logprobs": [top[token]], "top_logprobs": [top]}
            yield {"choices": [{"logprobs": found}]}
        yield {"choices": [], "usage": {"prompt_tokens": count}}


class Server(ThreadingHTTPServer):
    """Takes as many connections at once as a run makes; Python's takes five."""

    request_queue_size = 128


if __name__ == "__main__":
    # As vLLM does: a shell has what it starts in the background ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    port = int(sys.argv[sys.argv.index("--port") + 1])
    if FAULT == "a refusal":
        sys.exit("kvpatch refuses to start vLLM: a, because b; c. [KVP404]")
    assert OURS or "--kv-offloading-size" not in sys.argv
    Server(("127.0.0.1", port), Handler).serve_forever()
