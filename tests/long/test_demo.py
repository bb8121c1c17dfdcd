"""The demo as a person starts it: it passes, and leaves nothing behind."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from harness import ROOT, smollm2

LIMIT = 500  # a guard against a hang; an idle machine needs two minutes
WAYS = ("plain", "tier", "kvpatch")
LOGS = {f"{way}-{model}.log" for way in WAYS for model in ("first", "second")}
# The real model where someone has got it: no test downloads it.
MODELS = [] if (smollm2.folder() / "model.safetensors").exists() else ["--generated"]


class Demo:
    """A running ``scripts/demo --quick``, and every process it was seen to have."""

    def __init__(self, folder: Path) -> None:
        # Short, because sockets lie in it: tmp_path is too long for them.
        self.temporary = Path(tempfile.mkdtemp(prefix="demo-"))
        self.output = ""
        self.seen: set[psutil.Process] = set()
        command = [ROOT / "scripts/demo", "--quick", "--report", folder / "report", *MODELS]
        command += ["--keep-logs", folder / "logs"]
        self.process = subprocess.Popen(
            [str(part) for part in command],
            env=dict(os.environ, TMPDIR=str(self.temporary)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def read_until(self, words: str) -> None:
        """Read what it prints until ``words`` come, or to the end when it never says them."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            with suppress(psutil.NoSuchProcess):
                self.seen |= set(psutil.Process(self.process.pid).children(recursive=True))
            if words in line:
                return

    def finish(self) -> int:
        """Wait for its end and return its exit status."""
        self.read_until("\0")
        return self.process.wait(LIMIT)

    def leftovers(self) -> list[object]:
        """What of it is still there: processes, temporary files, shared memory, sockets."""
        running = [process for process in self.seen if process.is_running()]
        # The processes' names hold the demo's pid: scripts/demo becomes the demo.
        name = f"kvpatch-harness-{self.process.pid}-"
        shared = [*Path("/dev/shm").glob(f"*{name}*"), *Path("/tmp").glob(f"kvcached-tp-{name}*")]
        return [*running, *self.temporary.iterdir(), *shared]


@pytest.fixture
def demo(tmp_path):
    demo = Demo(tmp_path)
    yield demo
    if demo.process.poll() is None:  # the test failed before its end
        demo.process.terminate()
        demo.process.communicate(timeout=LIMIT)
    shutil.rmtree(demo.temporary)


def test_the_demo_passes_and_writes_its_report(demo, tmp_path):
    assert demo.finish() == 0, demo.output
    assert re.search(r"([1-9]\d*) of \1\s+tokens equal to plain vLLM's", demo.output)
    assert re.search(r"[1-9][\d,]* of [\d,]+\s+tokens of returning prompts not", demo.output)
    report = (tmp_path / "report/index.html").read_text()
    assert report.count("<svg") == 1
    assert "KV on elastic memory: yes" in report
    assert not re.search(r"(?:src|href)=.(?!#)", report), "it loads something from elsewhere"
    assert {path.name for path in (tmp_path / "logs").iterdir()} == LOGS
    assert len(demo.seen) >= 18  # six servers of three processes each
    assert demo.leftovers() == []


@pytest.mark.parametrize(
    ("signum", "moment"),
    [(signal.SIGINT, "starting both servers"), (signal.SIGTERM, "plain vLLM: first peak")],
    ids=["Ctrl-C while the servers start", "SIGTERM under load"],
)
def test_an_interrupted_demo_leaves_nothing(demo, signum, moment):
    demo.read_until(moment)
    assert moment in demo.output, demo.output
    demo.process.send_signal(signum)
    assert demo.finish() == 128 + signum, demo.output
    assert f"Interrupted by {signum.name}" in demo.output
    assert demo.leftovers() == []
