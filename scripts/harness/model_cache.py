"""Small models with random weights, made once and kept beside the environment they need."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness.console import HarnessError, interrupts
from harness.processes import SCRIPTS, clean_environment

# Kept between runs, beside the environment it was made with.
CACHE = Path(sys.prefix) / "kvpatch-harness"


def kept_model(seed: int, say: Callable[[str], None], kv_heads: int = 4) -> Path:
    """Return the folder of the llama model with random weights of ``seed``.

    Raises:
        HarnessError: it could not be made.
    """
    source = Path(__file__).with_name("models.py").read_bytes()
    recipe = f"{hashlib.sha256(source).hexdigest()[:12]}-{seed}-{kv_heads}"
    model = CACHE / "models" / recipe
    if (model / "model.safetensors").exists():
        say(f"model: 4 layers, random weights of seed {seed}, cached")
        return model
    say(f"model: making one of 4 layers with random weights of seed {seed}")
    partial = model.with_name(f"{recipe}-{os.getpid()}")
    command = [sys.executable, "-m", "harness.models", str(partial)]
    try:
        # A process of its own, because torch and transformers would stay in this one.
        made = subprocess.run(
            [*command, "--seed", str(seed), "--kv-heads", str(kv_heads)],
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
    return model
