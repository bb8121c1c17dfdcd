"""The models: made once, and kept beside the environment they were made with."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness.console import interrupts
from harness.console import HarnessError
from harness.console import Screen
from harness.serve import CACHE

SCRIPTS = Path(__file__).resolve().parents[1]


def kept_model(seed: int, screen: Screen, kv_heads: int = 4) -> Path:
    """Return the folder of the small model with random weights of ``seed``.

    Raises:
        HarnessError: it could not be made.
    """
    script = SCRIPTS / "tiny_model.py"
    recipe = f"{hashlib.sha256(script.read_bytes()).hexdigest()[:12]}-{seed}-{kv_heads}"
    model = CACHE / "models" / recipe
    if (model / "model.safetensors").exists():
        screen.say(f"model: 4 layers, random weights of seed {seed}, made before")
        return model
    screen.say(f"model: making one of 4 layers with random weights of seed {seed}")
    partial = model.with_name(f"{recipe}-{os.getpid()}")
    try:
        made = subprocess.run(
            [
                *(sys.executable, str(script), str(partial)),
                *("--seed", str(seed), "--kv-heads", str(kv_heads)),
            ],
            # torch makes a cache wherever it is imported; not in the user's /tmp.
            env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(CACHE / "torchinductor")},
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
