"""Small models with real random weights, for the demo and the tests.

The weights are large enough (initializer range 0.12) that every byte of the KV
cache shows in the tokens; vLLM's dummy weights are so small that any KV cache
gives the same ones. The tokenizer has one token a byte and needs no download.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# Of K and of V of each layer, of models whose checkpoint asks for fp8 KV caches.
SCALES = {"scaled": (0.05, 0.02), "scaled otherwise": (0.4, 0.15)}
STATES = (1, 2, 3)  # behind which layers an EAGLE-3 head reads them
HEADS = ("eagle", "eagle3")  # that draft for llama
KINDS = (*SCALES, "llama", "sliding", "latent", "hybrid", "seeing", "two sizes", "draft", *HEADS)
# Of the weights of a draft model, in standard deviations of each: a third of its drafts is right.
NOISE = 0.02
IMAGE = 64  # pixels of a side, and tokens, of an image of the model that sees

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(folder: Path) -> int:
    """Write a byte-level tokenizer into ``folder``; return its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)
    # By the name that transformers of every release knows.
    known = {"tokenizer_class": "PreTrainedTokenizerFast"}
    saved = folder / "tokenizer_config.json"
    saved.write_text(json.dumps(json.loads(saved.read_text()) | known))
    return len(vocabulary)


def make_processor(folder: Path) -> None:
    """Write a processor of images beside the tokenizer in ``folder``."""
    import transformers
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    transformers.Blip2Processor(
        BlipImageProcessorPil(size={"height": IMAGE, "width": IMAGE}),
        transformers.AutoTokenizer.from_pretrained(folder),
        num_query_tokens=IMAGE,
    ).save_pretrained(folder)


def make_model(
    folder: Path, kind: str = "llama", layers: int = 4, seed: int = 7, kv_heads: int = 4
) -> Path:
    """Write a model of ``kind`` with seeded random weights into ``folder``.

    llama: grouped-query attention, one KV cache group. sliding: sliding-window and
    full attention layers in turn, two groups. latent: multi-head latent attention (MLA)
    of the size that vLLM's CPU backend has, one group. hybrid: Mamba2 and attention layers
    in turn, two groups, in bfloat16, the only type that vLLM's CPU kernels have. seeing:
    llama behind a vision tower; of those that vLLM has, one that needs no torchvision. two
    sizes: sliding-window and full attention in turn, whose heads and so pages differ in size.
    draft: llama with noise, which drafts for it. eagle, eagle3: heads that draft for it.
    scaled, scaled otherwise: llama with scales of an fp8 KV cache, as llm-compressor writes them.

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
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 16384,
        "initializer_range": 0.12,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }
    config: Any
    kind_of_model: Any = transformers.AutoModelForCausalLM
    if kind in HEADS:
        shape["num_hidden_layers"] = 1
    if kind in ("llama", "draft", *HEADS, *SCALES):
        config = transformers.LlamaConfig(head_dim=64, **shape)
        if kind == "eagle3":
            config.eagle_aux_hidden_state_layer_ids = list(STATES)
    elif kind == "sliding":
        config = transformers.Gemma3TextConfig(
            head_dim=64,
            sliding_window=256,
            layer_types=["sliding_attention", "full_attention"] * (layers // 2),
            query_pre_attn_scalar=64,
            **shape,
        )
    elif kind == "two sizes":
        config = transformers.Gemma4TextConfig(
            head_dim=64,
            global_head_dim=128,
            num_global_key_value_heads=kv_heads,
            sliding_window=256,
            layer_types=["sliding_attention", "full_attention"] * (layers // 2),
            hidden_size_per_layer_input=0,
            num_kv_shared_layers=0,
            **shape,
        )
    elif kind == "latent":
        config = transformers.DeepseekV2Config(
            kv_lora_rank=512,
            q_lora_rank=None,
            qk_rope_head_dim=64,
            qk_nope_head_dim=64,
            v_head_dim=64,
            first_k_dense_replace=layers,  # no experts
            **shape | {"num_key_value_heads": 8},
        )
    elif kind == "hybrid":
        config = transformers.GraniteMoeHybridConfig(
            **hybrid_shape(layers),
            num_local_experts=0,
            num_experts_per_tok=0,
            pad_token_id=1,
            **shape,
        )
    elif kind == "seeing":
        make_processor(folder)
        small: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "initializer_range": 0.12,
        }
        config = transformers.Blip2Config(
            vision_config={"image_size": IMAGE, "patch_size": 8, **small},
            qformer_config={"encoder_hidden_size": 64, "vocab_size": 1, **small},
            text_config={"model_type": "llama", "head_dim": 64, **shape},
            num_query_tokens=IMAGE,
            initializer_range=0.12,
        )
        kind_of_model = transformers.AutoModelForImageTextToText
    else:
        raise ValueError(f"no model of kind {kind}; there are {', '.join(KINDS)}")
    torch.manual_seed(seed)
    model = kind_of_model.from_config(config, dtype=torch.float32)
    if kind == "draft":
        with torch.no_grad():
            for weight in model.parameters():
                if weight.dim() > 1:
                    weight.add_(torch.randn_like(weight), alpha=NOISE * float(weight.std()))
    model.save_pretrained(folder)
    if kind in HEADS:
        leave_the_head(folder, states=len(STATES) if kind == "eagle3" else 0)
    elif kind in SCALES:
        add_scales(folder, *SCALES[kind])
    return folder


def hybrid_shape(layers: int) -> dict[str, Any]:
    """Return what makes a configuration one of Mamba2 and attention layers in turn."""
    return {
        "layer_types": ["mamba", "attention"] * (layers // 2),
        "position_embedding_type": "rope",
        "shared_intermediate_size": 512,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
    }


def leave_the_head(folder: Path, states: int) -> None:
    """Make a saved model of one layer an EAGLE head, which reads states of the model.

    It adds a little to the last one, so that it mostly drafts the token before once more. EAGLE-3
    reads so many states, of which ``fc`` makes one, and the token's embedding in its attention.
    """
    import torch
    from safetensors.torch import load_file, save_file

    weights = {
        name.removeprefix("model."): weight * (0.1 if "o_proj" in name or "down" in name else 1)
        for name, weight in load_file(folder / "model.safetensors").items()
        if ".layers." in name and (states or "input_layernorm" not in name)
    }
    size = weights["layers.0.self_attn.o_proj.weight"].shape[0]
    weights["fc.weight"] = torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1)
    if states:
        weights = {name.replace("layers.0", "midlayer"): one for name, one in weights.items()}
        for name in ("q_proj", "k_proj", "v_proj"):
            name = f"midlayer.self_attn.{name}.weight"
            weights[name] = torch.cat([weights[name], weights[name].clone()], dim=1)
        others = torch.zeros(size, (states - 1) * size)
        weights["fc.weight"] = torch.cat([others, torch.eye(size)], dim=1)
        for name in ("midlayer.hidden_norm.weight", "norm.weight"):
            weights[name] = torch.ones(size)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def add_scales(folder: Path, of_keys: float, of_values: float) -> None:
    """Give a saved model a ``kv_cache_scheme``, and the scales of every layer."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("self_attn.k_proj.weight")]:
        layer = name.removesuffix("k_proj.weight")
        weights[f"{layer}k_scale"] = torch.tensor([of_keys])
        weights[f"{layer}v_scale"] = torch.tensor([of_values])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = folder / "config.json"
    scheme = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": scheme,
    }
    made = json.loads(config.read_text()) | {"quantization_config": quantization}
    config.write_text(json.dumps(made, indent=1))


def main(*arguments: str) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", choices=KINDS, default="llama")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--kv-heads", type=int, default=4)
    given = parser.parse_args(arguments)
    print(make_model(given.folder, given.kind, seed=given.seed, kv_heads=given.kv_heads))


if __name__ == "__main__":
    main(*sys.argv[1:])
