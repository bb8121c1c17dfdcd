"""Build kvcached from its unchanged sdist against an ACL runtime."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from kvpatch.ascend.runtime import Runtime
from kvpatch.supported import KVCACHED_SDISTS

HERE = Path(__file__).parent


def install(runtime: Runtime, version: str, target: Path | None = None) -> int:
    """Build kvcached, past pip's cache, and install it; return pip's status, or LookupError."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        raise LookupError("torch is not installed in this environment; pip install torch first")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--force-reinstall"]
    command += ["--no-deps", "--no-build-isolation", "--no-binary", "kvcached", "--require-hashes"]
    if target is not None:
        command += ["--target", str(target), "--upgrade"]
    with tempfile.TemporaryDirectory() as folder:
        # kvcached's setup.py imports torch, and refuses one without CUDA. The stand-in is no
        # package of kvpatch, so that nothing else can import it.
        stand_in = Path(folder, "stand-in", "torch.py")
        stand_in.parent.mkdir()
        stand_in.write_bytes((HERE / "stand_in.py").read_bytes())
        wanted = Path(folder, "kvcached.txt")  # pip takes hashes from a file only
        wanted.write_text(f"kvcached=={version} --hash=sha256:{KVCACHED_SDISTS[version]}\n")
        environment = dict(
            os.environ,
            KVPATCH="0",
            KVCACHED_AUTOPATCH="0",
            PYTHONPATH=str(stand_in.parent),
            STAND_IN_TORCH=str(Path(torch.origin).parent),
            STAND_IN_HEADERS=str(HERE / "include"),
            STAND_IN_RUNTIME=str(runtime.home),
        )
        return subprocess.run(
            [*command, "-r", str(wanted)], env=environment, check=False
        ).returncode
