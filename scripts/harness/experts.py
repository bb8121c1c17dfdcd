"""Small models of experts and of layers that draft (mtp), of random weights.

Beside ``harness.models``, whose recorded runs are of the models as they are there.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.model_cache import command
from harness.models import hybrid_shape, make_tokenizer

KIND, LATENT, HYBRID = ("experts", "latent experts", "hybrid experts")
INDEXED = "indexed"  # latent attention to ``CHOSEN`` tokens, without experts and with them
SPARSE = (INDEXED, f"{INDEXED} {KIND}")
DELTA = "hybrid delta"
DELTAS = (DELTA, f"{DELTA} mtp")
SLIDING = "sliding mtp"
DRAFTED = ("latent mtp", "hybrid mtp", DELTAS[1], SLIDING)
KINDS = (KIND, LATENT, HYBRID, *DRAFTED, DELTA, *SPARSE)
CHOSEN = 256
LAYERS, EXPERTS, SEED = 4, 8, 7
# Where others say how their experts are.
OF_OTHERS = (
    "n_routed_experts",
    "n_shared_experts",
    "first_k_dense_replace",
    "moe_intermediate_size",
)
OF_GLM = ("n_routed_experts", "n_shared_experts", "first_k_dense_replace")
OF_EXPERTS = (*OF_OTHERS, "num_experts_per_tok")
LAST_ATTENTION = 6  # of the layers of the hybrid that drafts
# Of the attention that vLLM's CPU backend has, as ``harness.models`` has it.
LATENT_SHAPE = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "n_group": 1,
    "topk_group": 1,
}


def make_model(folder: Path, kind: str = KIND, kv_heads: int = 4) -> Path:
    """Write a model of ``kind`` into ``folder``.

    Of its layers all but the first have experts, of which each token has two, and one more that all
    have. experts: GLM-4.5's architecture, grouped-query attention, one KV cache group; behind the
    last layer is one that drafts from the model's last state and the next token. latent experts:
    DeepSeek-V2's, with the attention of ``harness.models``' latent. hybrid experts: its hybrid, all
    of whose layers have experts. indexed, indexed experts: GLM-5's, whose indexers choose the
    tokens of the same attention; the first is dense, and the other has a layer that drafts, too.
    latent mtp: DeepSeek-V3's, dense, the same. hybrid mtp: Nemotron-H's, dense: Mamba2 and
    attention in turn, and attention that drafts. hybrid delta: Qwen3-Next's: gated delta nets and
    attention in turn, the last layer with experts; with mtp the first, as the one that drafts.
    sliding mtp: K-EXAONE's, dense: windows and full attention in turn, and full attention that
    drafts.

    Returns:
        ``folder``; nothing is written when the model is already there.
    """
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    shape: dict[str, Any] = {
        "vocab_size": (make_tokenizer(folder) + 63) // 64 * 64,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_attention_heads": 8,
        "max_position_embeddings": 16384,
        "initializer_range": 0.12,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
    }
    if kind == LATENT:
        config: Any = transformers.DeepseekV2Config(
            num_hidden_layers=LAYERS, num_key_value_heads=8, **LATENT_SHAPE, **shape
        )
    elif kind in SPARSE:
        dense, drafting = (1, 1) if KIND in kind else (LAYERS, 0)
        config = transformers.GlmMoeDsaConfig(
            num_hidden_layers=LAYERS + drafting,
            num_key_value_heads=8,
            mlp_layer_types=["dense"] * dense + ["sparse"] * (LAYERS + drafting - dense),
            index_topk=CHOSEN,
            index_n_heads=4,
            index_head_dim=128,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            **LATENT_SHAPE | shape | {"q_lora_rank": 128, "first_k_dense_replace": dense},
        )
    elif kind == "latent mtp":
        config = transformers.DeepseekV3Config(
            num_hidden_layers=LAYERS + 1,
            num_key_value_heads=8,
            # Beside others last digits differ, by which a token may choose another expert.
            **LATENT_SHAPE | shape | {"first_k_dense_replace": LAYERS + 1},
        )
    elif kind == "hybrid mtp":
        config = transformers.NemotronHConfig(
            hybrid_override_pattern="M-*-M-*-M-",
            num_nextn_predict_layers=1,
            mtp_layers_block_type=["full_attention"],
            num_key_value_heads=kv_heads,
            head_dim=32,
            mamba_num_heads=8,
            mamba_head_dim=64,
            mamba_n_groups=1,
            ssm_state_size=16,
            mamba_chunk_size=64,
            rescale_prenorm_residual=False,
            **without(shape, *OF_EXPERTS),
        )
    elif kind in DELTAS:
        # With the layer that drafts as many of each kind; vLLM wants experts in one at least.
        layers, with_experts = (LAYERS, LAYERS - 1) if kind == DELTA else (LAYERS + 1, 0)
        config = transformers.Qwen3NextConfig(
            num_hidden_layers=layers,
            layer_types=in_turn("linear_attention", layers),
            mlp_only_layers=[layer for layer in range(layers) if layer != with_experts],
            num_experts=EXPERTS,
            shared_expert_intermediate_size=128,
            num_key_value_heads=kv_heads,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
            **without(shape, *OF_GLM),
        )
    elif kind == SLIDING:
        config = transformers.ExaoneMoeConfig(
            num_hidden_layers=LAYERS + 1,  # with the one that drafts as many of each
            layer_types=in_turn("sliding_attention", LAYERS + 1),
            mlp_layer_types=["dense"] * (LAYERS + 1),
            sliding_window=256,
            num_key_value_heads=kv_heads,
            head_dim=64,
            mtp_layer_types=["full_attention"],
            **without(shape, *OF_EXPERTS),
        )
    elif kind == HYBRID:
        config = transformers.GraniteMoeHybridConfig(
            **hybrid_shape(LAYERS),
            num_hidden_layers=LAYERS,
            num_key_value_heads=kv_heads,
            num_local_experts=EXPERTS,
            **without(shape, *OF_OTHERS),
        )
    else:
        config = transformers.Glm4MoeConfig(
            num_hidden_layers=LAYERS + 1, num_key_value_heads=kv_heads, head_dim=64, **shape
        )
    torch.manual_seed(SEED)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    if kind in (KIND, "latent mtp", f"{INDEXED} {KIND}"):
        let_the_last_layer_draft(folder)
    if kind == "hybrid mtp":
        let_attention_draft(folder)
    if kind == DELTAS[1]:  # whose norms are of the weights and one more
        let_full_attention_draft(folder, dense=0, plain=0.0)
    if kind == SLIDING:
        let_full_attention_draft(folder, dense=LAYERS - 1, plain=1.0)
    return folder


def in_turn(first: str, layers: int) -> list[str]:
    """Return the kinds of layers of which every second one has full attention."""
    return [(first, "full_attention")[layer % 2] for layer in range(layers)]


def without(shape: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return a shape without what another architecture has no name for."""
    return {name: value for name, value in shape.items() if name not in names}


@contextmanager
def saved(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield the weights and the configuration of a saved model, and write what they became."""
    from safetensors.torch import load_file, save_file

    file, path = folder / "model.safetensors", folder / "config.json"
    weights, config = load_file(file), json.loads(path.read_text())
    yield weights, config
    save_file(weights, file, {"format": "pt"})
    path.write_text(json.dumps(config, indent=1))


def let_the_last_layer_draft(folder: Path) -> None:
    """Make the last layer of a saved model the one that drafts, which has the model's own ends."""
    layer = f"model.layers.{LAYERS}"
    with saved(folder) as (weights, config):
        weights |= {
            f"{layer}.embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
            **from_the_last_state(layer, len(weights["model.norm.weight"])),
            f"{layer}.shared_head.norm.weight": weights["model.norm.weight"].clone(),
            f"{layer}.shared_head.head.weight": weights["lm_head.weight"].clone(),
        }
        config |= {
            name: one[:LAYERS] for name, one in config.items() if name.endswith("layer_types")
        }
        config |= {"num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}


def let_attention_draft(folder: Path) -> None:
    """Add a layer that drafts to a saved Nemotron-H, with the weights of its last attention."""
    last = f"backbone.layers.{LAST_ATTENTION}."
    with saved(folder) as (weights, config):
        # vLLM takes one of its weights as the configuration says, whatever it is told.
        weights |= {name: one.bfloat16() for name, one in weights.items()}
        ends = weights["backbone.norm_f.weight"]
        of_last = {name: one for name, one in weights.items() if name.startswith(last)}
        weights |= {
            **{name.replace(last, "mtp.layers.0."): one.clone() for name, one in of_last.items()},
            **from_the_last_state("mtp.layers.0", len(ends)),
            "mtp.layers.0.final_layernorm.weight": ends.clone(),
        }
        config["dtype"] = "bfloat16"


def let_full_attention_draft(folder: Path, dense: int, plain: float) -> None:
    """Add a layer that drafts to a saved model, with the weights of its last full attention.

    Args:
        folder: of the model.
        dense: the layer with what is behind attention.
        plain: the weight of a norm that changes no scale.
    """
    import torch

    attention, behind = f"model.layers.{LAYERS - 1}.", f"model.layers.{dense}."
    with saved(folder) as (weights, config):
        ends = weights["model.norm.weight"]
        size = len(ends)
        weights |= {
            name.replace(layer, "mtp.layers.0."): one.clone()
            for name, one in weights.items()
            if name.startswith(layer := behind if ".mlp." in name else attention)
        }
        weights |= {
            "mtp.fc.weight": torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1),
            "mtp.pre_fc_norm_embedding.weight": torch.full((size,), plain),
            "mtp.pre_fc_norm_hidden.weight": torch.full((size,), plain),
            "mtp.norm.weight": ends.clone(),
        }
        config["num_nextn_predict_layers"] = 1


def from_the_last_state(layer: str, size: int) -> dict[str, Any]:
    """Return the weights by which a layer that drafts reads the model's last state alone."""
    import torch

    return {
        f"{layer}.enorm.weight": torch.ones(size),
        f"{layer}.hnorm.weight": torch.ones(size),
        f"{layer}.eh_proj.weight": torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1),
    }


if __name__ == "__main__":
    command(KINDS, make_model)
