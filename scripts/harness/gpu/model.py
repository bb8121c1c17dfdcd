"""The models of the steps, of random weights: nothing is carried to the machine for them.

python -m harness.gpu.model FOLDER     1.2 billion weights in bfloat16, made on the GPU
"""

import sys
from pathlib import Path

from harness import model_cache
from harness.gpu.seen import Job
from harness.models import make_tokenizer

SEED = 7
# Wide enough that a prompt takes as long to compute as that of a small model in use, and narrow
# enough that it is made in seconds.
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "initializer_range": 0.05,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
}


def small(job: Job) -> str:
    """Return the model by whose answers is judged: the operator's, or four layers."""
    return job.model or str(model_cache.kept_model(SEED, print))


def wide(job: Job) -> str:
    """Return the model by which is measured: on the host device it is the small one."""
    if job.model or job.host:
        return small(job)
    folder = model_cache.CACHE / "models" / "wide"
    if not (folder / "model.safetensors").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        model_cache.make(folder, module="harness.gpu.model")
    return str(folder)


def main(folder: str) -> None:
    """Make the wide model."""
    import torch
    import transformers

    tokens = make_tokenizer(Path(folder))
    torch.manual_seed(SEED)
    with torch.device("cuda"):
        made = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(vocab_size=(tokens + 63) // 64 * 64, **SHAPE),
            dtype=torch.bfloat16,
        )
    made.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
