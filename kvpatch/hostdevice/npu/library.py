"""Build the operators for an environment's torch, and start them in its processes."""

from __future__ import annotations

import sysconfig
from importlib.util import find_spec
from pathlib import Path

from kvpatch.hostdevice.acl.library import compiled

HERE = Path(__file__).parent
LIBRARY = "libkvpatch_npu.so"
STARTUP = "kvpatch-npu.pth"


def build(home: Path) -> Path:
    """Build the operators into an emulator's folder; RuntimeError says why it cannot be."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        raise RuntimeError("torch is not installed")
    folder = Path(torch.origin).parent
    made = home / "lib64" / LIBRARY
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-fvisibility=hidden"]
    command += ["-o", str(made), str(HERE / "aten.cpp"), f"-I{folder / 'include'}"]
    command += [f"-L{folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    compiled(command)
    return made


def start_with_python(library: Path) -> None:
    """Let every process of this environment that imports torch_npu compute with ``library``."""
    startup = Path(sysconfig.get_path("purelib")) / STARTUP
    startup.write_text(
        f"import sys; sys.path.append({str(HERE / 'startup')!r}); "
        f"import kvpatch_npu; kvpatch_npu.start({str(library)!r})\n"
    )


def install(home: Path) -> None:
    """Build the operators and start them in this environment's processes."""
    start_with_python(build(home))
