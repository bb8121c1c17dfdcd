"""``scripts/gpu bundle``: what a machine with torch, and without a network, lacks to serve.

Part 1 serves the first release, each later one has a release more, and the last has what was left
out of the first one's kernels, in case that the driver minds it.
"""

import argparse
import fnmatch
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from harness import ROOT
from harness.console import HarnessError
from harness.gpu import RELEASES, archives, fatbin, kvcached, parts
from harness.venvs import made
from kvpatch.supported import KVCACHED_SDISTS

PYTHON = "3.12"
PINS = ROOT / "scripts/pins-gpu.txt"
KERNELS = "vllm/_C_stable_libtorch.abi3.so"
# Of no use to a dense model in bfloat16 on compute capability 9.0: FlashAttention 2 (there is 3),
# mixtures of experts, latent attention, other quantizations, and the frontend in Rust.
LEFT_OUT = (
    "vllm/vllm-rs",
    "*_fa2_C*",
    "*_moe_C*",
    "*_flashmla*",
    "*_flashkda*",
    "*_qutlass*",
    "*_deepselect*",
    "*_rust_tool*",
    "*third_party/deep_gemm/*",
    "*third_party/fmha_sm100/*",
    "*.jpg",
    "*swagger-ui*",
)
UNREAD = ("mistral_common/data", "pycountry/locales", "bin")  # data of packages; serving reads none
_LINUX = ("2_31", "2_28", "2_17", "2_5")
PLATFORM = [
    *("--python-version", PYTHON, "--implementation", "cp", "--only-binary=:all:", "--no-deps"),
    *(word for one in _LINUX for word in ("--platform", f"manylinux_{one}_x86_64")),
    *("--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"),
]

Say = Callable[[str], None]


def main(options: argparse.Namespace, say: Say) -> int:
    """Make the parts; return the exit status.

    Raises:
        HarnessError: a step failed; the message says which, and why.
    """
    work = options.work.absolute()
    (work / "made").mkdir(parents=True, exist_ok=True)
    shared = Maker(work / "made", options.cuda, say)
    shared.wheel()  # by itself: it may make .venv
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs: list[Callable[[], list[Path]]] = [
            *(partial(shared.vllm, release) for release in RELEASES),
            *(shared.packages, shared.kvcached),
        ]
        *releases, packages, ours = pool.map(lambda job: job(), jobs)
    first, *more = releases
    original = [path for path in first if path.name.startswith("original-")]
    serving = [*packages, *ours, shared.wheel(), *(one for one in first if one not in original)]
    planned = parts.planned([serving, *more, original], int(options.size * 1e6))
    for number, pieces in enumerate(planned, 1):
        folder = work / str(number)
        parts.write(pieces, folder)
        size = sum(path.stat().st_size for path in folder.iterdir())
        say(f"{folder}: {size:,} bytes: {', '.join(piece.name for piece in pieces)}")
    return 0


class Maker:
    """Makes what goes into parts, each once."""

    def __init__(self, folder: Path, cuda: Path, say: Say) -> None:
        self._folder, self._cuda, self._say = folder, cuda, say
        self._wheel: Path | None = None

    def wheel(self) -> Path:
        """Return kvpatch's wheel, as it is released."""
        if self._wheel is None:
            self._run("scripts/build", ROOT / "scripts/build")
            (self._wheel,) = (ROOT / "dist").glob("kvpatch-*.whl")
        return self._wheel

    def packages(self) -> list[Path]:
        """Return the archive of the packages beside vLLM."""

        def fill(tree: Path) -> None:
            self._pip("install", "--no-compile", "--target", tree, "-r", PINS)
            for name in UNREAD:
                shutil.rmtree(tree / name, ignore_errors=True)

        return self._archive("packages", PINS.read_text() + repr(UNREAD), fill)

    def kvcached(self) -> list[Path]:
        """Return the archive of kvcached, compiled."""
        ((version, digest),) = KVCACHED_SDISTS.items()
        name = f"kvcached-{version}.tar.gz"

        def fill(tree: Path) -> None:
            sdist = self._download(name, f"kvcached=={version}", "--no-binary=kvcached")
            if parts.digest(sdist) != digest:
                raise HarnessError(f"{sdist} is not the kvcached {version} that kvpatch is for")
            kvcached.build(sdist, PYTHON, self._cuda, tree)

        recipe = digest + Path(kvcached.__file__).read_text()
        return self._archive(f"site-kvcached-{version}", recipe, fill)

    def vllm(self, release: str) -> list[Path]:
        """Return the archives of a release: what serves, and what was blanked in the first one."""
        name = f"vllm-{release}-cp38-abi3-manylinux_2_28_x86_64.whl"
        left_out = [f"original-{release}"] if release == RELEASES[0] else []

        def fill(tree: Path, *original: Path) -> None:
            wheel = self._download(name, f"vllm=={release}", *PLATFORM)
            with zipfile.ZipFile(wheel) as packed:
                names = (one for one in packed.namelist() if not _is_left_out(one))
                packed.extractall(tree, names)
            kernels = tree / KERNELS
            whole, released = kernels.read_bytes(), parts.digest(kernels)
            spans = fatbin.others(whole)
            kernels.write_bytes(fatbin.blanked(whole, spans))
            for folder in original:
                described = {"in": KERNELS, "sha256": released, "spans": spans}
                (folder / "spans.json").write_text(json.dumps(described))
                with (folder / "bytes").open("wb") as file:
                    file.writelines(whole[begin : begin + size] for begin, size in spans)

        recipe = repr(LEFT_OUT) + Path(fatbin.__file__).read_text()
        return self._archive(f"vllm-{release}", recipe, fill, *left_out)

    def _archive(
        self, name: str, recipe: str, fill: Callable[..., None], *others: str
    ) -> list[Path]:
        """Return archives and sums of folders that ``fill`` fills, made anew if that changed."""
        folder = self._folder / name
        wanted = [folder / f"{one}{archives.ENDING}" for one in (name, *others)]

        def make() -> None:
            self._say(f"making {', '.join(path.name for path in wanted)}")
            folder.mkdir(parents=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as temporary:
                trees = [Path(temporary, path.name) for path in wanted]
                for tree in trees:
                    tree.mkdir()
                fill(*trees)
                for tree, archive in zip(trees, wanted, strict=True):
                    archives.pack(tree, archive)

        made(folder, f"{recipe}{Path(archives.__file__).read_text()}", make)
        return [path for archive in wanted for path in (archive, archives.sums_of(archive))]

    def _download(self, name: str, requirement: str, *options: str) -> Path:
        path = self._folder.parent / "downloads" / name
        if not path.exists():
            self._say(f"downloading {name}")
            # pip asks a source distribution for its metadata, and kvcached's asks for a torch.
            stand_in = {"PYTHONPATH": str(ROOT / "kvpatch/hostdevice/buildtime")}
            more = ("--no-deps", "--no-build-isolation")
            with tempfile.TemporaryDirectory(dir=self._folder) as temporary:
                self._pip("download", "-d", temporary, *options, *more, requirement, **stand_in)
                path.parent.mkdir(exist_ok=True)
                Path(temporary, name).replace(path)
        return path

    def _pip(self, verb: str, *words: str | Path, **environment: str) -> None:
        command = [sys.executable, "-m", "pip", verb, "-q", "--disable-pip-version-check"]
        command += PLATFORM if verb == "install" else []
        self._run(f"pip {verb}", *command, *words, **environment)

    def _run(self, what: str, *command: str | Path, **environment: str) -> None:
        done = subprocess.run(
            [str(word) for word in command],
            env=os.environ | {"KVPATCH": "0"} | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise HarnessError(f"{what} failed: {(done.stderr or done.stdout).strip()[-2000:]}")


def _is_left_out(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in LEFT_OUT)
