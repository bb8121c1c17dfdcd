"""A small model of random weights that hears: Qwen2-Audio's tower before full attention."""

import json
from pathlib import Path
from typing import Any

from harness.model_cache import command
from harness.models import make_tokenizer

KIND = "hearing"
LAYERS, SEED = 4, 7
TOKENS = 64  # of a sound
RATE = 16_000  # samples of a second
SAMPLES = 4 * TOKENS * 160  # a frame has 160, and a token four frames
PLACE = 258  # the token in the place of a sound, behind those of bytes


def make_model(folder: Path, kind: str = KIND, kv_heads: int = 4) -> Path:
    """Write the model into ``folder``; ``kind`` is the one there is.

    Returns:
        ``folder``; nothing is written when the model is already there.
    """
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    folder.mkdir(parents=True, exist_ok=True)
    assert make_tokenizer(folder) == PLACE
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"]}
    )
    transformers.Qwen2AudioProcessor(
        transformers.WhisperFeatureExtractor(feature_size=128), tokenizer
    ).save_pretrained(folder)
    # By the name that transformers of every release knows.
    saved = folder / "tokenizer_config.json"
    known = {"tokenizer_class": "PreTrainedTokenizerFast"}
    saved.write_text(json.dumps(json.loads(saved.read_text()) | known))
    config = transformers.Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": 128,
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "initializer_range": 0.12,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": 320,
            "hidden_size": 512,
            "intermediate_size": 512,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 8,
            "num_key_value_heads": kv_heads,
            "max_position_embeddings": 16384,
            "initializer_range": 0.12,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "tie_word_embeddings": False,
        },
        audio_token_index=PLACE,
        initializer_range=0.12,
    )
    torch.manual_seed(SEED)
    made = transformers.Qwen2AudioForConditionalGeneration._from_config(config, dtype=torch.float32)
    made.save_pretrained(folder)
    # By the names of the checkpoints that people have, which vLLM reads.
    weights = folder / "model.safetensors"
    renamed = {
        name.replace("model.model.", "model."): one for name, one in load_file(weights).items()
    }
    save_file(renamed, weights, {"format": "pt"})
    return folder


if __name__ == "__main__":
    command((KIND,), make_model)
