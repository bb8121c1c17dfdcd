"""Stand-ins for the models that vLLM's tests name: a configuration and a byte tokenizer of each.

No weights: what loads them is deselected. The shapes are the smallest of which a test's sums are
still right; the tests that look at a shape look at its windows and its state spaces.
"""

import json
from pathlib import Path
from typing import Any

from harness import models

COMMIT = "0" * 40  # a snapshot of the hub's cache is named by one

SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 512,
    "max_position_embeddings": 32768,
    "vocab_size": 512,
    "dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
STATES: dict[str, Any] = {"state_size": 16, "conv_kernel": 4, "expand": 2, "time_step_rank": 16}
GROUPED: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 64}


def _of(architecture: str, kind: str, **shape: Any) -> dict[str, Any]:
    return SMALL | {"model_type": kind, "architectures": [architecture]} | shape


OPT = _of("OPTForCausalLM", "opt", ffn_dim=512, word_embed_proj_dim=256) | {
    "max_position_embeddings": 2048,
    "dtype": "float16",
}
LLAMA = _of("LlamaForCausalLM", "llama", **GROUPED)
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": OPT,
    "facebook/opt-350m": OPT | {"do_layer_norm_before": False},
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA,
    "meta-llama/Llama-3.1-8B": LLAMA,
    "hmellor/tiny-random-LlamaForCausalLM": LLAMA | {"max_position_embeddings": 2048},
    "Qwen/Qwen3-0.6B": _of("Qwen3ForCausalLM", "qwen3", **GROUPED),
    "Qwen/Qwen1.5-7B": _of("Qwen2ForCausalLM", "qwen2", num_key_value_heads=4),
    "google/gemma-3-1b-it": _of(
        "Gemma3ForCausalLM", "gemma3_text", sliding_window=512, query_pre_attn_scalar=64, **GROUPED
    ),
    "openai/gpt-oss-20b": _of(
        "GptOssForCausalLM",
        "gpt_oss",
        sliding_window=128,
        num_local_experts=4,
        num_experts_per_tok=2,
        **GROUPED,
        **WINDOWS,
    ),
    "tiiuae/falcon-mamba-7b": _of("FalconMambaForCausalLM", "falcon_mamba", **STATES),
    "state-spaces/mamba-130m-hf": _of("MambaForCausalLM", "mamba", **STATES),
    "state-spaces/mamba-1.4b-hf": _of("MambaForCausalLM", "mamba", **STATES),
}


def make(hub: Path) -> None:
    """Write the stand-ins into the hub's cache in ``hub``, as huggingface_hub lays it out."""
    for name, configuration in CONFIGURATIONS.items():
        root = hub / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = root / "snapshots" / COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        (root / "refs").mkdir(exist_ok=True)
        (root / "refs/main").write_text(COMMIT)
        models.make_tokenizer(snapshot)
        (snapshot / "config.json").write_text(json.dumps(configuration))
        ends = {"bos_token_id": 0, "eos_token_id": 1}
        (snapshot / "generation_config.json").write_text(json.dumps(ends))
