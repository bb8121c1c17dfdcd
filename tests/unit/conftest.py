"""A world of fakes: a tiny vllm and kvcached, found before any real ones."""

import subprocess
import sys
import tempfile
from pathlib import Path

import packaging
import pytest
import wrapt
from fakes import distribution, write
from suspend_world import worlds

from kvpatch import claims
from kvpatch.environ import STATUS_DIR
from kvpatch.logs import log

__all__ = ["worlds"]

ROOT = Path(__file__).parents[2]

VLLM = """
import sys
events = getattr(sys, "events", [])
sys.events = events
events.append("vllm")
"""
PLATFORMS = """
class current_platform:
    is_cpu = staticmethod(lambda: False)
"""
SERVING = """
class Server:
    def serve(self, request):
        return request
"""
AUTOPATCH = """
import sys
from wrapt import when_imported
@when_imported("vllm")
def patch(vllm):
    sys.events.append("kvcached")
"""
# In the place of kvpatch's features: one, with one patch of the fake vllm.
PATCHES = """
import sys
from kvpatch import patches
from kvpatch.patch import Feature, Patch
def around(wrapped, instance, args, kwargs):
    return "patched " + wrapped(*args, **kwargs)
def noted():
    sys.events.append("kvpatch")
    return True
serve = Patch("fake.serve", "vllm.serving:Server.serve", "why", "upstream", "until",
              "fake_patches:around", ("request",), since="0.28")
patches.FEATURES = (
    Feature("fake", "a fake", (serve,), since="0.28", wanted="fake_patches:noted"),
)
"""


@pytest.fixture(autouse=True)
def shared_memory():
    """Let no test see the claims, sockets and ledgers of this user's engines, or leave its own."""
    # A context of its own, or what tests patch would be undone after their own fixtures.
    with (
        tempfile.TemporaryDirectory(dir=claims.BASE, prefix="kvpatch-test-") as folder,
        pytest.MonkeyPatch.context() as here,
    ):
        here.setattr(claims, "BASE", Path(folder))
        yield


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of status pages of the test's own."""
    monkeypatch.setenv(STATUS_DIR.name, str(tmp_path))
    return tmp_path


@pytest.fixture
def fakes(tmp_path):
    """A folder with a fake vllm and kvcached of supported versions."""
    folder = tmp_path / "fakes"
    write(
        folder,
        {
            "vllm/__init__.py": VLLM,
            "vllm/platforms.py": PLATFORMS,
            "vllm/serving.py": SERVING,
            "kvcached/__init__.py": "",
            "kvcached/integration/__init__.py": "",
            "kvcached/integration/vllm/__init__.py": "",
            "kvcached/integration/vllm/autopatch.py": AUTOPATCH,
            "fake_patches.py": PATCHES,
        },
    )
    distribution(folder, "vllm", "0.28.0")
    distribution(folder, "kvcached", "0.1.6")
    return folder


@pytest.fixture
def python(run, fakes, tmp_path):
    """Run code in an interpreter that sees the fakes, kvpatch's sources and its needs.

    ``-S`` keeps every installed startup file out; code that wants ours calls the stub.
    """
    needs = tmp_path / "needs"
    needs.mkdir()
    for module in (wrapt, packaging):
        home = Path(module.__file__).parent
        (needs / home.name).symlink_to(home)
    path = ":".join(map(str, (fakes, ROOT, ROOT / "kvpatch/startup", needs)))

    def python(code, **environment):
        script = tmp_path / "script.py"
        script.write_text(code)
        return run(sys.executable, "-S", script, PYTHONPATH=path, **environment)

    return python


@pytest.fixture
def warned(caplog, monkeypatch):
    """What kvpatch logs, once: vLLM's loggers do not propagate, and it may not be imported."""
    monkeypatch.setattr(log, "propagate", False)
    log.addHandler(caplog.handler)
    yield caplog
    log.removeHandler(caplog.handler)


@pytest.fixture(scope="session")
def apart():
    """Return the start of a command that runs in namespaces of its own, by ``unshare``'s names."""

    def apart(*names):
        command = ["unshare", *names]
        asked = subprocess.run([*command, "true"], check=False, capture_output=True, text=True)
        if asked.returncode:
            pytest.skip(f"this machine refuses namespaces: {asked.stderr.strip()}")
        return command

    return apart
