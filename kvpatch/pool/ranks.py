"""Asking every worker to register an extent with its device, or to deregister it.

A worker connects to its engine's socket and answers from a thread of its own, so that neither
the engine nor a worker's step waits. A worker that is gone takes its engine with it.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_message = struct.Struct("<cQQ")
_hello = struct.Struct("<I")
REGISTER, DEREGISTER = b"R", b"D"
# Registering 64 MiB takes about 10 ms; a worker that computes holds Python's lock for some time.
PATIENCE = 60.0
LONGEST = 1 << 16  # bytes of what a worker says first

# Registers or deregisters (True, False) the bytes [offset, offset + size) of the tier.
Registrar = Callable[[bool, int, int], bool]


class Failed(RuntimeError):
    """A worker could not do what it was asked to, or did not answer."""


class Hello(NamedTuple):
    """What a worker says first.

    Attributes:
        pid: its process.
        about: what the engine has to know about its part of the tier.
    """

    pid: int
    about: bytes


class Ranks:
    """The workers of an engine, seen from the engine.

    Args:
        path: of the socket, in a folder that only this user can enter.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            path.unlink(missing_ok=True)  # of an engine of the same name that was killed
            self._listening.bind(str(path))
            self._listening.listen(128)
        except BaseException:
            self._listening.close()
            raise
        self._workers: list[socket.socket] = []
        self._owed: list[int] = []  # answers of each that nobody waits for any more

    def accept(self, count: int) -> list[Hello]:
        """Take the connections of workers, which have all connected; return who they are.

        Raises:
            Failed: fewer have.
        """
        self._listening.settimeout(PATIENCE)
        found: list[Hello] = []
        for _ in range(count):
            try:
                worker, _ = self._listening.accept()
                worker.settimeout(PATIENCE)
                self._workers.append(worker)
                self._owed.append(0)
                said = worker.recv(LONGEST)
                found.append(Hello(_hello.unpack_from(said)[0], said[_hello.size :]))
            except (OSError, struct.error) as error:
                raise Failed(f"{len(found)} of {count} workers connected") from error
        self._listening.close()
        self.path.unlink(missing_ok=True)
        return found

    def register(self, offset: int, size: int) -> None:
        """Have every worker register a committed range.

        Raises:
            Failed: one has not; the others have deregistered it, unless one did not answer.
        """
        try:
            self._all(REGISTER, offset, size)
        except Failed:
            self.deregister(offset, size)
            raise

    def deregister(self, offset: int, size: int) -> None:
        """Have every worker deregister a range, where it has.

        Raises:
            Failed: one has not, so that the range must stay committed.
        """
        self._all(DEREGISTER, offset, size)

    def close(self) -> None:
        """Let the workers deregister what they have, and go."""
        self._listening.close()
        self.path.unlink(missing_ok=True)
        for worker in self._workers:
            worker.close()
        self._workers.clear()

    def _all(self, what: bytes, offset: int, size: int) -> None:
        self._catch_up()
        try:
            for number, worker in enumerate(self._workers):
                worker.sendall(_message.pack(what, offset, size))
                self._owed[number] += 1
            # All answers are read, so that the next ones are not taken for them.
            answers = [self._answer(number) for number in range(len(self._workers))]
        except OSError as error:
            raise Failed("a worker did not answer") from error
        if any(answer != b"1" for answer in answers):
            word = "register" if what == REGISTER else "deregister"
            raise Failed(f"a worker could not {word} host memory with its device")

    def _catch_up(self) -> None:
        """Read the answers that did not come in time; a worker that owes one is asked nothing."""
        for number, worker in enumerate(self._workers):
            if not self._owed[number]:
                continue
            worker.settimeout(0)
            try:
                while self._owed[number]:
                    self._answer(number)
            except OSError as error:
                raise Failed("a worker did not answer before") from error
            finally:
                worker.settimeout(PATIENCE)

    def _answer(self, number: int) -> bytes:
        answer = self._workers[number].recv(1)
        if not answer:
            raise ConnectionError("the worker is gone")
        self._owed[number] -= 1
        return answer


class Rank:
    """A worker's end.

    Args:
        path: of its engine's socket.
        registrar: does what it is asked to; it is called in a thread of its own.
        about: what the engine has to know about its part of the tier.

    Raises:
        OSError: the engine is gone.
    """

    def __init__(self, path: Path, registrar: Registrar, about: bytes = b"") -> None:
        self._registrar = registrar
        self._ranges: dict[int, int] = {}  # those that are registered: size by offset
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(str(path))
            self._socket.sendall(_hello.pack(os.getpid()) + about)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._run, name="kvpatch-host-pool", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Deregister what is registered; nothing is asked for any more."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for offset, size in self._ranges.items():
            self._registrar(False, offset, size)
        self._ranges.clear()

    def _run(self) -> None:
        with self._socket, suppress(OSError):
            while data := self._socket.recv(_message.size):
                self._socket.sendall(b"1" if self._do(*_message.unpack(data)) else b"0")

    def _do(self, what: bytes, offset: int, size: int) -> bool:
        if (what == REGISTER) == (offset in self._ranges):
            return True
        done = self._registrar(what == REGISTER, offset, size)
        if done and what == REGISTER:
            self._ranges[offset] = size
        elif done:
            del self._ranges[offset]
        return done
