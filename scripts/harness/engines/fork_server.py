"""Forks engines: a process that has imported everything that vLLM imports, and nothing of vLLM.

    python -m harness.engines.fork_server MODULES.json

Importing torch, transformers and what else vLLM needs takes many times as long as vLLM itself.
A fork has all of it, and then starts as a Python that was just started does: with an environment
of its own, through kvpatch's startup file, importing vLLM, kvcached and kvpatch itself. Whatever
these read from the environment, and whatever they patch, is the fork's alone.

Requests come over a socket, which is standard input. Each has the descriptors of the fork's
standard input, output and errors, and of a pipe to which its process id and exit status are
sent.
"""

import atexit
import faulthandler
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from harness import provenance
from harness.evidence import executed

REQUEST = 1 << 18  # bytes of the largest
# Packages that a fork imports itself.
OWN = ("vllm", "kvcached", "kvpatch", "kvpatch_startup", "harness", "__main__", "__mp_main__")


def preload(modules: list[str]) -> None:
    """Import the modules that there are; one that fails is left to whoever needs it."""
    for name in modules:
        if name.partition(".")[0] not in OWN:
            with suppress(BaseException):
                importlib.import_module(name)


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for every request; return the request, in the fork.

    Ends this process, and every fork that still runs, when the other end of the socket is closed.
    """
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    running: dict[int, tuple[int, Connection]] = {}  # by the fork's pidfd: its pid, and its pipe
    while True:
        for key, _ in selector.select():
            if key.fileobj is not requests:
                pid, pipe = running.pop(key.fd)
                selector.unregister(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with pipe, suppress(BrokenPipeError):
                    pipe.send(status)
                os.close(key.fd)
                continue
            message, descriptors, _, _ = socket.recv_fds(requests, REQUEST, 4)
            if not message:
                for pid, _ in running.values():
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                os._exit(0)  # nothing here needs to be shut down
            *standard, end = descriptors
            pid = os.fork()
            if pid == 0:
                selector.close()
                requests.close()
                for number, descriptor in enumerate(standard):
                    os.dup2(descriptor, number)
                for _, pipe in running.values():
                    pipe.close()
                for descriptor in (*descriptors, *running):
                    os.close(descriptor)
                return dict(json.loads(message))
            for descriptor in standard:
                os.close(descriptor)
            pipe = Connection(end, readable=False)
            pipe.send(pid)
            watched = os.pidfd_open(pid)
            running[watched] = pid, pipe
            selector.register(watched, selectors.EVENT_READ)


def become(request: dict[str, Any]) -> None:
    """Run a module's ``main`` as a fresh Python with this environment runs it."""
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["module"], *request["arguments"]]
    executed.start()
    startup = importlib.import_module("kvpatch_startup")
    startup.start()
    module = importlib.import_module(request["module"])
    if kvpatch := sys.modules.get("kvpatch"):
        provenance.check_installed(str(kvpatch.__file__))
    gc.freeze()  # vLLM collects a dozen times; what is imported stays
    # It also freezes what an engine has, and at its end thaws everything to collect it. Without
    # both, it collects what the engine had alone.
    gc.freeze = gc.unfreeze = lambda: None
    faulthandler.enable()
    module.main(*request["arguments"])
    leave()


def leave() -> None:
    """End this process as one of vLLM's engines ends: what was registered runs, and no more.

    Python's own end stops a daemon thread wherever that asks for the interpreter next. Inside of
    C++ that is SIGABRT, in one engine of some thousands, after its last answer.
    """
    # Also tells the threads of executors to end, which a join of them would wait for in vain.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main(modules: Path) -> None:
    """Serve, and go on as the fork that was asked for."""
    requests = socket.socket(fileno=os.dup(0))
    preload(json.loads(modules.read_text()))
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert threads == 1, f"an import has started {threads - 1} threads, which a fork would lack"
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page of it
    become(serve(requests))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
