"""The socket of an engine: questions in, progress and answers out, on threads of its own.

What changes the engine is done on the engine's thread, to which a question travels through
vLLM's queue of client requests: an idle engine waits for nothing else.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvpatch import private, state
from kvpatch.control import protocol
from kvpatch.logs import log
from kvpatch.patch import argument
from kvpatch.patches.suspend.suspension import Cannot, Phase, Suspension
from kvpatch.patches.suspend.told import first_limit_bytes
from kvpatch.process import start_ticks
from kvpatch.telemetry import publisher
from kvpatch.telemetry.counters import refused
from kvpatch.upstream import kvcached_api, kvcached_limits

TOGETHER = 64  # questions at a time
ASKING = 10.0  # seconds in which a question has to be there
BETWEEN = 0.2  # seconds between two lines of progress
LOCKED = 5.0  # seconds for the lock of the folder, which is held for a few calls
LOOKS = 1.0  # seconds between two looks whether the socket is still there
GRACE = 2.0  # seconds for an engine to give up by itself what takes too long


class Handed:
    """What is on its way to an engine's thread, where a ``taken_by`` on the engine takes it."""

    taken_by: type

    def take(self, engine: Any) -> None:
        """Do what is due; on the engine's thread."""
        raise NotImplementedError


def hand_over(engine: Any, what: Handed) -> None:
    """Let something reach the engine's thread, also while that waits for its clients.

    In vLLM's queue of client requests, which ignores what comes with a WAKEUP.
    """
    from vllm.v1.engine import EngineCoreRequestType

    engine.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, what))


def around_client_request(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """Take what was handed over. Wraps ``EngineCoreProc._handle_client_request(_, request)``."""
    request = argument(args, kwargs, 1, "request")
    if not isinstance(request, Handed):
        return wrapped(*args, **kwargs)
    request.take(state.find(instance, request.taken_by))
    return None


class Question(Handed):
    """A question on its way to the engine's thread; ``said`` is the outcome, once ``taken``."""

    taken_by = Suspension

    def __init__(self, asked: dict[str, Any], by: str = "") -> None:
        self.asked = asked
        self.by = by
        self.since = time.monotonic()
        self.taken = threading.Event()
        self.said: dict[str, Any] = {}
        self._once = threading.Lock()

    def withdraw(self) -> bool:
        """Ask no longer; return False if the engine's thread has it already."""
        return self._once.acquire(blocking=False)

    def take(self, suspension: Suspension) -> None:
        """Do what is asked, or begin it; on the engine's thread."""
        if not self._once.acquire(blocking=False):
            return  # nobody wants it any more
        try:
            suspension.by = self.by
            self.said = answer(suspension, self.asked, self.since)
        except Cannot as cannot:
            refused(suspension.engine, self.asked.get("verb"))
            log.info("kvpatch: %s%s is refused: %s", self.asked.get("verb"), self.by, cannot)
            self.said = {"error": str(cannot)}
        except Exception as error:
            self.said = {"error": f"it failed with {type(error).__name__}: {error}"}
            if kvcached_limits.must_end(error):
                raise
            log.exception("kvpatch: %s failed", self.asked.get("verb"))
        finally:
            self.taken.set()


def answer(suspension: Suspension, asked: dict[str, Any], since: float) -> dict[str, Any]:
    """Begin what is asked; return what is known at once. Raises Cannot if it is refused."""
    verb = asked.get("verb")
    if verb == "suspend":
        if asked.get("plan"):
            return suspension.plan() | {"plan": True}
        timeout = asked.get("timeout")
        if timeout is not None and seconds(timeout) is None:
            raise Cannot("the timeout is no number of seconds")
        suspension.suspend(bool(asked.get("finish")), bool(asked.get("whole")), timeout, since)
    elif verb == "resume":
        suspension.resume()
    elif verb == "limit":
        size = asked.get("size")
        if not isinstance(size, int) or isinstance(size, bool):
            raise Cannot("the limit is no number of bytes")
        revision = asked.get("revision")
        if revision is not None and (not isinstance(revision, int) or isinstance(revision, bool)):
            raise Cannot("the revision is no number")
        suspension.limit(size, revision)
    elif verb == "demand":
        from kvpatch.patches.suspend.demand import demand  # here, because few engines are asked

        controls = seconds(asked.get("controls"))
        if controls is not None:
            suspension.controller.heard(controls, _limit_alone(suspension, asked.get("alone")))
        return demand(suspension.engine)
    else:
        raise Cannot(f"it knows {', '.join(protocol.VERBS)}, and not {verb!r}")
    return {}


def seconds(timeout: Any) -> float | None:
    """Return a number of seconds that was asked for, if it is one."""
    if not isinstance(timeout, int | float) or isinstance(timeout, bool):
        return None
    try:
        number = float(timeout)
    except OverflowError:
        return None
    return number if 0 < number < float("inf") else None


def _limit_alone(suspension: Suspension, size: Any) -> int | None:
    """Return the limit that an engine is to take without a controller, as it can take it."""
    if not isinstance(size, int) or isinstance(size, bool):
        return None
    manager = kvcached_api.manager_of(suspension.engine)
    return max(kvcached_api.page_bytes(manager), min(size, kvcached_api.most(manager)))


class Gone(Handed):
    """Tells an engine that waits for its clients that its controller is gone."""

    taken_by = Suspension

    def take(self, suspension: Suspension) -> None:
        """Take the limit that it is to have then; on the engine's thread."""
        suspension.advance()


class Server:
    """Listens for the user of an ``EngineCore``, on which it is kept; OSError if it cannot."""

    def __init__(self, engine: Any, suspension: Suspension, name: str) -> None:
        self.path = protocol.path_of(name)
        self._name = name
        self._engine = weakref.ref(engine)
        self._suspension = weakref.ref(suspension)
        self._socket = self._listen()
        self._free = threading.Semaphore(TOGETHER)
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="kvpatch-control", daemon=True).start()

    def _listen(self) -> socket.socket:
        private.make_folder(self.path.parent)
        made = socket.socket(socket.AF_UNIX)
        try:
            # Who has bound its socket listens, or is gone.
            with private.alone(self.path.parent, private.within(LOCKED)):
                sweep(self.path.parent)
                made.bind(str(self.path))
                self.path.chmod(0o600)
                made.listen(TOGETHER)
            made.settimeout(LOOKS)
        except BaseException:
            made.close()
            raise
        return made

    def _listen_again(self) -> None:
        """Listen again if the path was removed, as by systemd-logind with RemoveIPC=yes."""
        if self.path.exists() or self._closed.is_set():
            return
        before = self._socket
        try:
            self._socket = self._listen()
        except OSError as error:
            log.debug("kvpatch: the socket that was removed is not there again: %r", error)
            return
        before.close()
        if self._closed.is_set():
            self.close()  # again: it has closed the one before

    def look_at_controller(self) -> None:
        """Tell the engine's thread if the controller of its limit is gone."""
        engine, suspension = self._engine(), self._suspension()
        if engine is not None and suspension is not None and suspension.controller.is_gone:
            hand_over(engine, Gone())

    def close(self) -> None:
        """Listen no longer."""
        self._closed.set()
        # Once it is closed, an engine that starts may bind a socket of its own at the path.
        with suppress(OSError):
            self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _run(self) -> None:
        while True:
            self.look_at_controller()  # also while others ask all the time
            self._free.acquire()
            try:
                connection, _ = self._socket.accept()
            except TimeoutError:
                self._free.release()
                self._listen_again()
                continue
            except OSError as error:
                self._free.release()
                if self._socket.fileno() < 0 or self._closed.is_set():
                    return
                log.debug("kvpatch: a connection was not accepted: %r", error)
                self._closed.wait(BETWEEN)  # no descriptor is free, for example
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread is free
                log.debug("kvpatch: a connection was not served: %r", error)
                connection.close()
                self._free.release()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                protocol.check_peer(connection)
                connection.settimeout(ASKING)
                asked = next(protocol.lines(connection), None)
                if asked is not None:
                    self._answer(connection, asked)
        except (OSError, ValueError, RecursionError) as error:  # it is gone, or sends what is none
            log.debug("kvpatch: a question was not answered: %r", error)
        finally:
            self._free.release()

    def _answer(self, connection: socket.socket, asked: dict[str, Any]) -> None:
        engine, suspension = self._engine(), self._suspension()
        if engine is None or suspension is None:
            return
        if asked.get("verb") == "describe":
            protocol.send(connection, describe(engine, suspension, self._name) | {"done": True})
            return
        if gone(connection):
            return  # it was given up while the engine was stopped: others may rely on that by now
        pid = protocol.pid_of(connection)
        question = Question(asked, f" by pid {pid}" if pid else "")
        hand_over(engine, question)
        del engine
        while not question.taken.wait(BETWEEN):  # it is in a step
            if self._engine() is None:
                return
            if late(question.asked, question.since) and question.withdraw():
                why = "its engine took no question, and does not begin"
                said = {"phase": suspension.phase.value, "done": True}
                protocol.send(connection, said | {"error": not_within(asked, why)})
                return
            protocol.send(connection, {"phase": suspension.phase.value})
        if question.said:
            publisher.refresh()
            said = without_outcome(suspension.said)
            protocol.send(connection, said | question.said | {"done": True})
            return
        follow(connection, suspension, asked, question.since)


def gone(connection: socket.socket) -> bool:
    """Whether the other end of a connection has closed it, or was killed."""
    connection.setblocking(False)  # Python waits for what comes, whatever the flags say
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(ASKING)


def sweep(folder: Path) -> None:
    """Remove the sockets of engines that were killed; nobody else may be binding one meanwhile."""
    for path in folder.glob("*.sock"):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)  # a queue that is full is somebody's
            if caller.connect_ex(str(path)) == errno.ECONNREFUSED:
                path.unlink(missing_ok=True)


def follow(
    connection: socket.socket, suspension: Suspension, asked: dict[str, Any], since: float
) -> None:
    """Tell the progress of a verb until it has ended, also by what others ask meanwhile."""
    wanted = {"suspend": Phase.SUSPENDED, "resume": Phase.RUNS}.get(str(asked["verb"]))
    told = 0.0
    while True:
        with suspension.changed:
            if not ended(suspension.said, wanted):
                suspension.changed.wait(BETWEEN)
            said, given_up = suspension.said, suspension.given_up
        why = ""
        if ended(said, wanted):
            why = why_not_done(said, given_up, asked)
        elif wanted is Phase.SUSPENDED and late(asked, since, GRACE):
            why = not_within(asked, f"in the phase {said['phase']}")
        else:
            if time.monotonic() - told >= BETWEEN:
                told = time.monotonic()
                protocol.send(connection, said)
            continue
        said = without_outcome(said) | ({"error": why} if why else {})
        publisher.refresh()
        protocol.send(connection, said | {"done": True})
        return


def without_outcome(said: dict[str, Any]) -> dict[str, Any]:
    """Return what an engine said, but for why a verb failed, which may be an earlier one."""
    return {name: value for name, value in said.items() if name not in ("error", "unset")}


def ended(said: dict[str, Any], wanted: Phase | None) -> bool:
    """Whether a verb has ended, well or not: a suspension that was given up runs again."""
    phase = said.get("phase")
    if wanted is None:
        return not said.get("lowers")
    return phase in (wanted.value, Phase.RUNS.value, Phase.SUSPENDED.value)


def why_not_done(said: dict[str, Any], given_up: str, asked: dict[str, Any]) -> str:
    """Return why what a verb has ended with is not what was asked for; empty if it is."""
    verb, suspended = asked["verb"], said["phase"] == Phase.SUSPENDED.value
    if verb == "suspend" and not suspended:
        return str(said.get("error") or given_up or "it was resumed meanwhile")
    if verb == "suspend" and asked.get("whole") and (lost := said.get("lost")):
        return f"it is suspended, and its CPU tier does not have {lost} blocks"
    if verb == "resume" and suspended:
        return "it was suspended again meanwhile"
    return str(said.get("unset", "")) if verb == "resume" else ""


def late(asked: dict[str, Any], since: float, more: float = 0.0) -> bool:
    """Whether the time for a suspension is over."""
    timeout = seconds(asked.get("timeout")) if asked.get("verb") == "suspend" else None
    return timeout is not None and time.monotonic() - since > timeout + more


def not_within(asked: dict[str, Any], why: str) -> str:
    """Return the sentence on a suspension whose time is over."""
    return f"it was not suspended within {asked['timeout']:g} s: {why}"


def describe(engine: Any, suspension: Suspension, name: str) -> dict[str, Any]:
    """Return what an engine is and does, read on any thread."""
    manager = kvcached_api.manager_of(engine)
    served = engine.vllm_config.model_config.served_model_name
    scheduler = engine.scheduler
    return {
        "name": name,
        "pid": os.getpid(),
        "started": start_ticks(os.getpid()),  # in a container every first process has one pid
        "models": [served] if isinstance(served, str) else list(served or ()),
        "phase": suspension.phase.value,
        "why_not": suspension.why_not(),
        "limit": kvcached_api.limit(manager),
        "promised": suspension.promised(),
        "revision": suspension.revision,
        "most": kvcached_api.most(manager),
        "first": first_limit_bytes(manager),
        "mapped": kvcached_api.mapped(manager),
        "running": len(scheduler.running),
        "waiting": sum(scheduler.get_request_counts()) - len(scheduler.running),
    }
