"""Small heads of random weights that draft several tokens at once for llama (DFlash, DSpark)."""

import json
from pathlib import Path
from typing import Any

from harness.model_cache import command
from harness.models import STATES, make_tokenizer

KINDS = ("dflash", "dspark")
LAYERS, SEED = 2, 11
SIZE, BETWEEN, HEADS, OF_EACH, RANK = 256, 512, 8, 64, 32
SPREAD = 0.12  # of the weights
MASK = 2  # the token in the place of those that are drafted


def make_model(folder: Path, kind: str, kv_heads: int = 4) -> Path:
    """Write a head of ``kind`` into ``folder``.

    Its layers keep K and V of the model's states, and see all tokens that they draft. dspark: a
    token that was drafted has its say in the next one.

    Returns:
        ``folder``; nothing is written when the head is already there.
    """
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tokens = (make_tokenizer(folder) + 63) // 64 * 64
    torch.manual_seed(SEED)
    weights = {"fc.weight": (SIZE, len(STATES) * SIZE), "hidden_norm.weight": (SIZE,)}
    for layer in range(LAYERS):
        attention, dense = f"layers.{layer}.self_attn", f"layers.{layer}.mlp"
        weights |= {
            f"{attention}.q_proj.weight": (HEADS * OF_EACH, SIZE),
            f"{attention}.k_proj.weight": (kv_heads * OF_EACH, SIZE),
            f"{attention}.v_proj.weight": (kv_heads * OF_EACH, SIZE),
            f"{attention}.o_proj.weight": (SIZE, HEADS * OF_EACH),
            f"{attention}.q_norm.weight": (OF_EACH,),
            f"{attention}.k_norm.weight": (OF_EACH,),
            f"{dense}.gate_proj.weight": (BETWEEN, SIZE),
            f"{dense}.up_proj.weight": (BETWEEN, SIZE),
            f"{dense}.down_proj.weight": (SIZE, BETWEEN),
            f"layers.{layer}.input_layernorm.weight": (SIZE,),
            f"layers.{layer}.post_attention_layernorm.weight": (SIZE,),
        }
    weights["norm.weight"] = (SIZE,)
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": SIZE,
        "intermediate_size": BETWEEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": kv_heads,
        "head_dim": OF_EACH,
        "vocab_size": tokens,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": [layer - 1 for layer in STATES],
        },
    }
    if kind == "dspark":
        weights |= {f"markov_head.markov_w{one}.weight": (tokens, RANK) for one in (1, 2)}
        config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": RANK}
    save_file(
        {
            name: SPREAD * torch.randn(shape) if len(shape) > 1 else torch.ones(shape)
            for name, shape in weights.items()
        },
        folder / "model.safetensors",
        {"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


if __name__ == "__main__":
    command(KINDS, make_model)
