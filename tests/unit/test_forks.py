"""harness.engines.process: an engine's process, which several threads ask."""

import threading
from multiprocessing import Pipe

from harness.engines.process import Forked


def test_whoever_polls_a_fork_takes_nothing_from_who_waits_for_it():
    """A thread that wants a server asks which of them is idle, and so the forks of others."""
    ended = []
    for status in range(100):
        reading, writing = Pipe(duplex=False)
        writing.send(4711)
        fork = Forked(reading, ["engine"])
        waiting = threading.Thread(target=lambda fork=fork: ended.append(fork.wait(20)))
        waiting.start()
        writing.send(status)
        while waiting.is_alive():
            fork.poll()
        assert fork.poll() == status
    assert ended == list(range(100))
