"""Small models with random weights, made once and kept beside the environment they need."""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.console import HarnessError, interrupts
from harness.processes import SCRIPTS, clean_environment

# Kept between runs, beside the environment it was made with.
CACHE = Path(sys.prefix) / "kvpatch-harness"
MODELS = "harness.models"


def recipe(module: str = MODELS) -> str:
    """Return a name for how models of a module are made today, by those of ``harness.models``."""
    names = dict.fromkeys((MODELS, module))
    sources = [Path(__file__).with_name(f"{one.rpartition('.')[2]}.py") for one in names]
    return hashlib.sha256(b"".join(one.read_bytes() for one in sources)).hexdigest()[:12]


def make(model: Path, *options: str, python: str = sys.executable, module: str = MODELS) -> None:
    """Make a model in a folder of its own, in a process of a Python, unless it is there.

    Args:
        model: its folder.
        options: of ``module``.
        python: of an environment with torch and transformers, which would stay in this process.
        module: makes it in the folder that its command line begins with.

    Raises:
        HarnessError: it could not be made.
    """
    partial = model.with_name(f"{model.name}-{os.getpid()}-{threading.get_ident()}")
    try:
        made = subprocess.run(
            [python, "-m", module, str(partial), *options],
            env=clean_environment(
                KVPATCH="0",
                PYTHONPATH=str(SCRIPTS),
                TORCHINDUCTOR_CACHE_DIR=str(CACHE / "torchinductor"),
            ),
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )
        if made.returncode:
            raise HarnessError(f"the model could not be made: {made.stderr.strip()[-2000:]}")
        with interrupts.deferred():
            if not model.exists():  # another run may have been faster
                partial.rename(model)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def command(kinds: Sequence[str], make_model: Callable[..., Path]) -> None:
    """Run the command line of a module that makes models of some kinds, as ``make`` calls it."""
    parser = argparse.ArgumentParser(description="Make a small model of random weights.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=kinds, required=True)
    parser.add_argument("--kv-heads", type=int, default=4)
    given = parser.parse_args()
    print(make_model(given.folder, given.kind, given.kv_heads))


def kept_model(seed: int, say: Callable[[str], None], kv_heads: int = 4) -> Path:
    """Return the folder of the llama model with random weights of ``seed``.

    Raises:
        HarnessError: it could not be made.
    """
    model = CACHE / "models" / f"{recipe()}-{seed}-{kv_heads}"
    if (model / "model.safetensors").exists():
        say(f"model: 4 layers, random weights of seed {seed}, cached")
        return model
    say(f"model: making one of 4 layers with random weights of seed {seed}")
    make(model, "--seed", str(seed), "--kv-heads", str(kv_heads))
    return model
