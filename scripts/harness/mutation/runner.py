"""Run the nearest tests on mutants, each in a process of its own, in a copy of the tree.

The processes are forks of one that has imported pytest, so that most mutants cost as much as
the tests themselves.
"""

import compileall
import contextlib
import io
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.console import HarnessError
from harness.mutation.modules import SLOW, TENSORS
from harness.mutation.mutants import Mutant

ROOT = Path(__file__).parents[3]
# A mutant that hangs is noticed: by the limit of CI. Seconds, above three times the tests' own.
PATIENCE = 10
FORK = multiprocessing.get_context("fork")
MEMORY = 4 << 30  # bytes of addresses, for a loop that fills a list


@contextmanager
def scratch_tree() -> Iterator[Path]:
    """Yield a copy of the files that git has or would add; removed at the end."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout.decode()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # the modules change all the time
    with tempfile.TemporaryDirectory(prefix="kvpatch-mutation-", dir=memory) as folder:
        tree = Path(folder)
        for name in filter(None, listed.split("\0")):
            source = ROOT / name
            if source.is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, tree / name)
        for package in ("kvpatch", "scripts/harness"):
            compileall.compile_dir(str(tree / package), quiet=2, workers=1)
        yield tree


class Module:
    """A module at a path in a scratch tree, and its tests.

    Raises:
        HarnessError: the tests fail without a change.
    """

    def __init__(self, tree: Path, path: str, tests: Sequence[str]) -> None:
        self._tree = tree
        self._name = path
        self._path = tree / path
        self._source = self._path.read_bytes()
        quick = [test for test in tests if test not in SLOW]
        self._tests = [*filter(None, [quick]), *([test] for test in SLOW if test in tests)]
        self.seconds = 0.0
        self.check()

    def check(self) -> None:
        """Check that the tests pass without a change; else every mutant would look noticed.

        How long they take, on this machine at this time, is the measure of a hang.

        Raises:
            HarnessError: they do not.
        """
        begun = time.monotonic()
        for tests in self._tests:
            if self._fail(tests, None):
                raise HarnessError(
                    f"the tests of {self._name} fail without a change: {' '.join(tests)}"
                )
        self.seconds = time.monotonic() - begun

    def notices(self, mutant: Mutant) -> bool:
        """Return whether a test fails, or hangs, with the mutant."""
        return any(self._notice(tests, mutant) for tests in self._tests)

    def _notice(self, tests: Sequence[str], mutant: Mutant) -> bool:
        name = self._path.stem
        while True:
            for compiled in (self._path.parent / "__pycache__").glob(f"{name}.*.pyc"):
                compiled.unlink()
            self._path.write_bytes(mutant.apply(self._source))
            try:
                failed = self._fail(tests, 3 * self.seconds + PATIENCE)
            finally:
                self._path.write_bytes(self._source)
            if failed is not None:
                return failed
            before = self.seconds
            self.check()
            if self.seconds <= 2 * before:
                return True
            # The machine has become slower, and the tests may only have been late.

    def _fail(self, tests: Sequence[str], limit: float | None) -> bool | None:
        """Return whether tests fail; None if they take longer than ``limit`` seconds."""
        # The first run keeps what pytest compiles of the tests.
        child = FORK.Process(target=_run, args=(self._tree, tests, not self.seconds))
        child.start()
        child.join(limit)
        if child.exitcode is not None:
            return child.exitcode != 0
        os.killpg(child.pid or 0, signal.SIGKILL)
        child.join()
        return None


def warm(tests: Sequence[str]) -> None:
    """Import what every run of ``tests`` needs, before the processes are forked."""
    import packaging.version
    import psutil
    import pytest
    import rich.console
    import wrapt

    del packaging, psutil, rich, wrapt
    if f"tests/{TENSORS}" in tests:
        import torch
        import transformers

        torch.set_num_threads(1)  # no thread outlives a fork
        assert transformers.LlamaConfig
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # unit tests use none
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        pytest.main(["--version"])  # imports pytest's own plugins


def _run(tree: Path, tests: Sequence[str], keep: bool) -> None:
    """Run tests in this process, and end it with 0 if all pass. Only in a fork."""
    os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.chdir(tree)
    sys.dont_write_bytecode = not keep
    sys.path[:] = [str(tree), str(tree / "scripts"), *(p for p in sys.path if not _ours(p))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("kvpatch", "harness")]:
        del sys.modules[name]
    os.environ["PYTHONPATH"] = f"{tree}:{tree / 'scripts'}"
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ["KVPATCH"] = "0"
    import pytest

    if not os.environ.get("MUTATE_SHOW"):
        devnull = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(devnull, stream)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
    os._exit(0 if code == 0 else 1)  # whatever threads the tests have left


def _ours(path: str) -> bool:
    return path in ("", str(ROOT), str(ROOT / "scripts"))
