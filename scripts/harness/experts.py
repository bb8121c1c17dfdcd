"""A small model of experts with a layer that drafts for it (mtp), of random weights.

Beside ``harness.models``, whose recorded runs are of the models as they are there.
"""

import argparse
import json
import sys
from pathlib import Path

from harness.models import make_tokenizer

KIND = "experts"
LAYERS, EXPERTS, SEED = 4, 8, 7


def make_model(folder: Path, kv_heads: int = 4) -> Path:
    """Write a model of GLM-4.5's architecture into ``folder``.

    Grouped-query attention, one KV cache group; of its layers all but the first have experts, of
    which each token has two, and one more that all have. Behind the last one is a layer that drafts
    from the model's last state and the next token.

    Returns:
        ``folder``; nothing is written when the model is already there.
    """
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    config = transformers.Glm4MoeConfig(
        vocab_size=(make_tokenizer(folder) + 63) // 64 * 64,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=LAYERS + 1,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=16384,
        initializer_range=0.12,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    let_the_last_layer_draft(folder)
    return folder


def let_the_last_layer_draft(folder: Path) -> None:
    """Make the last layer of a saved model the one that drafts, which has the model's own ends."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    weights = load_file(file)
    layer, size = f"model.layers.{LAYERS}", weights["model.norm.weight"].shape[0]
    one = torch.ones(size)
    weights |= {
        f"{layer}.embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        f"{layer}.enorm.weight": one,
        f"{layer}.hnorm.weight": one.clone(),
        f"{layer}.eh_proj.weight": torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1),
        f"{layer}.shared_head.norm.weight": weights["model.norm.weight"].clone(),
        f"{layer}.shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    save_file(weights, file, {"format": "pt"})
    config = folder / "config.json"
    drafts = {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    config.write_text(json.dumps(json.loads(config.read_text()) | drafts, indent=1))


def main(*arguments: str) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kv-heads", type=int, default=4)
    given = parser.parse_args(arguments)
    print(make_model(given.folder, given.kv_heads))


if __name__ == "__main__":
    main(*sys.argv[1:])
