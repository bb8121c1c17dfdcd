"""Build the emulator, and find it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("memory.cpp", "streams.cpp", "copies.cpp", "compute.cpp")
LIBRARY = "libascendcl.so"
# By which torch_npu, and after them vllm-ascend, need what CANN has in several libraries.
NAMES = (
    *("libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so"),
    "libacl_tdt_channel.so",
    *("libregister.so", "libplatform.so", "libascendalog.so", "libopapi.so", "libruntime.so"),
    *("liberror_manager.so", "libprofapi.so", "libge_common_base.so", "libunified_dlog.so"),
    *("libmmpa.so", "libascend_dump.so", "libc_sec.so", "libatb.so"),
)
# Without which torch_npu does not start where ASCEND_HOME_PATH is set.
FOLDERS = ("opp", "runtime", "compiler")


def build(home: Path) -> Path:
    """Build the emulator at ``home`` as CANN is laid out, and return it, or RuntimeError."""
    libraries = home / "lib64"
    libraries.mkdir(parents=True, exist_ok=True)
    header = home / "include" / "acl" / "acl.h"
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_bytes((HERE / "include" / "acl" / "acl.h").read_bytes())
    made = libraries / f"{LIBRARY}.{os.getpid()}"
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-pthread", "-Wall"]
    command += ["-fvisibility=hidden", f"-Wl,--version-script={HERE / 'exports.map'}"]
    command += [f"-Wl,-soname,{LIBRARY}", "-o", str(made)]
    command += [f"-I{HERE / one}" for one in ("include", "no_torch")]
    command += [f"-I{HERE.parent / 'include'}"]
    command += [str(HERE / source) for source in SOURCES]
    compiled(command)
    made.replace(libraries / LIBRARY)  # never half a library for a process that starts now
    for name in NAMES:
        link = libraries / name
        link.unlink(missing_ok=True)
        link.symlink_to(LIBRARY)
    for folder in FOLDERS:
        (home / folder).mkdir(exist_ok=True)
    (home / "set_env.sh").write_text(
        f"export ASCEND_HOME_PATH={home} ASCEND_OPP_PATH={home / 'opp'}\n"
        f"export LD_LIBRARY_PATH={libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}\n"
    )
    return home


def compiled(command: list[str]) -> None:
    """Run g++, or raise RuntimeError with the end of its output."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise RuntimeError("g++ is not installed") from None
    if done.returncode:
        raise RuntimeError(f"g++ failed:\n{done.stderr[-3000:]}")
