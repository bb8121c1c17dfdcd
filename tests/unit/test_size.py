"""``kvpatch size``: the KV cache of a model from its configuration.

The bytes of a block are those that engines of every kind have stored and loaded in the recorded
runs: ``harness.engines.runs.block_bytes``, whose runs compare it with what they move.
"""

import json

import pytest

from harness.engines.runs import BLOCK, TOKENS, Run, block_bytes
from kvpatch import cli, model_shape
from kvpatch.model_shape import Unknown

SMALL = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 16384,
    "dtype": "float32",
}
TWO = ["sliding_attention", "full_attention"] * 2
CONFIGS = {  # what transformers writes for the models of ``harness.models``
    "llama": {"architectures": ["LlamaForCausalLM"], "head_dim": 64},
    "sliding": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 64,
        "sliding_window": 256,
        "layer_types": TWO,
    },
    "latent": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "head_dim": 64,
    },
    "indexed": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 256,
        "index_head_dim": 128,
        "layer_types": ["indexed_attention"] * 4,
    },
    "hybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
    },
}


def shape(kind, **given):
    return model_shape.of(SMALL | CONFIGS[kind], **given)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_block_has_the_bytes_that_engines_moved(kind):
    run = Run(model=kind)
    dtype = "" if kind == "hybrid" else "float32"  # vLLM's CPU kernels of states have no other
    found = shape(kind, block_tokens=TOKENS.get(kind, BLOCK), dtype=dtype)
    assert found.block_tokens == TOKENS.get(kind, BLOCK)
    assert found.block_bytes == block_bytes(run)


def test_a_block_in_fp8_has_as_many_bytes_of_four_times_the_tokens():
    found = shape("llama", block_tokens=4 * BLOCK, dtype="float32", cache="fp8")
    assert found.block_bytes == block_bytes(Run(model="llama", cache_dtype="fp8"))


def test_ranks_divide_heads_and_not_what_all_heads_share():
    one, two = shape("llama"), shape("llama", ranks=2)
    assert two.block_bytes == one.block_bytes // 2
    assert two.in_tier(160) == one.in_tier(160)
    one, two = shape("latent"), shape("latent", ranks=2)
    assert two.block_bytes == one.block_bytes
    assert two.in_tier(160) == one.in_tier(160)


def test_an_indexer_keeps_its_keys_beside_the_latents():
    """As vLLM's own engines have it; in fp8 the latents are packed with their scales."""
    dense, sparse, packed = shape("latent"), shape("indexed"), shape("indexed", cache="fp8")
    assert sparse.block_bytes == dense.block_bytes + 4 * 16 * 132
    assert packed.block_bytes == block_bytes(Run(model="indexed", cache_dtype="fp8"))
    assert sparse.pools == 2 * dense.pools
    windows = CONFIGS["indexed"] | {"compress_rates": {"compressed_sparse_attention": 4}}
    with pytest.raises(model_shape.Unknown, match="which kvcached does not take"):
        model_shape.of(SMALL | windows)


def test_a_block_grows_until_a_state_fits():
    found = shape("hybrid", block_tokens=16)
    assert found.state_bytes == 3 * (512 + 32) * 2 + 8 * 64 * 16 * 2
    a_token = 2 * 4 * 32 * 2
    assert found.block_tokens == 48
    assert found.block_tokens * a_token >= found.state_bytes > (found.block_tokens - 16) * a_token


def test_windows_stop_growing():
    found = shape("sliding", block_tokens=16)
    assert found.blocks(256) == 16 + 16
    assert found.blocks(16000) == 1000 + 17
    assert found.in_tier(16000) == 2000 * found.block_bytes
    assert found.token_bytes == 2 * found.long_token_bytes


def test_heads_of_two_sizes_have_blocks_of_the_larger():
    wide = {"per_layer_config": {"1": {"head_dim": 128}, "3": {"head_dim": 128}}}
    found = model_shape.of(SMALL | CONFIGS["sliding"] | wide, block_tokens=16)
    assert found.block_bytes == 2 * 16 * 2 * 4 * 128 * 2


def test_a_large_model_as_its_authors_say():
    llama = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    found = model_shape.of(llama | {"hidden_size": 4096, "torch_dtype": "bfloat16"})
    assert found.token_bytes == 128 << 10
    gemma = SMALL | {
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    }
    found = model_shape.of(gemma)
    assert found.layers == {"sliding windows": 52, "full attention": 10}
    assert len(found.groups) == 7


@pytest.mark.parametrize(
    ("model", "windowed"),
    [
        ({"model_type": "gemma2"}, 24),
        ({"model_type": "gemma3_text"}, 40),
        ({"model_type": "mistral"}, 48),
        ({"model_type": "qwen3_moe", "use_sliding_window": True}, 48),
        ({"model_type": "qwen2"}, 0),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192}, 36),
        ({"model_type": "llama4_text", "no_rope_layer_interval": 2}, 24),
        ({"model_type": "llama4_text", "no_rope_layers": [1, 0, 0] * 16}, 16),
    ],
)
def test_windows_that_a_configuration_leaves_to_transformers(model, windowed):
    found = model_shape.of(SMALL | {"sliding_window": 4096, "num_hidden_layers": 48} | model)
    assert (found.layers.get(model_shape.WINDOW, 0), sum(found.layers.values())) == (windowed, 48)


PHI = {"type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}
YARN = {"type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, 16384),
        ({"max_position_embeddings": None}, 0),
        ({"max_seq_len": 2048}, 2048),
        ({"max_seq_len": 2048, "model_max_length": 32768}, 32768),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 65536),  # deepseek-coder
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4}}}, 65536),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}, 16384),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 16384),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, 16384),
        ({"rope_scaling": PHI, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_scaling": PHI | {"original_max_position_embeddings": 16384}}, 16384),
        ({"rope_scaling": PHI}, 0),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 4096}}, 16384),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 16384}}, 0),
    ],
)
def test_the_longest_request_is_what_vllm_chooses(changes, longest):
    assert model_shape.of(SMALL | changes).longest == longest
    assert model_shape.of(SMALL | changes, longest=512).longest == 512


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layer_types": ["rwkv"] * 4}, "layers of the type rwkv are not known"),
        ({"layer_types": ["linear_attention"] * 4}, "has no layer with attention"),
        ({"num_hidden_layers": None}, "does not say how many layers"),
        ({"num_attention_heads": None}, "no heads of attention"),
        ({"mamba_d_state": 16}, "which layers have states"),
        ({"sliding_window": 256}, "which layers have windows"),
        ({"dtype": "int3"}, "computes in int3"),
        ({"num_attention_heads": "abc"}, "a value of another kind .*'abc'"),
        ({"layer_types": 5}, "a value of another kind"),
        ({"max_position_embeddings": "a"}, "a value of another kind"),
        ({"per_layer_config": 5}, "a value of another kind"),
    ],
)
def test_what_is_not_known_is_said(changes, said):
    with pytest.raises(Unknown, match=said):
        model_shape.of(SMALL | {"architectures": ["X"]} | changes | {"num_key_value_heads": None})


@pytest.fixture
def folder(tmp_path):
    def folder(name, kind="llama", **changes):
        path = tmp_path / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(SMALL | CONFIGS[kind] | changes))
        return path

    return folder


def test_the_command_says_what_fits_and_what_to_type(folder, capsys):
    chat, code = folder("chat"), folder("code", "sliding")
    (chat / "model.safetensors").write_bytes(b"\0" * 1024)
    words = ["size", str(chat), str(code), "--device", "4GiB", "--tier", "1GiB"]
    assert cli.main([*words, "--requests", "8", "--tokens", "1024"]) == 0
    out = capsys.readouterr().out
    assert "4 KiB per token; a block of 16 tokens has 64 KiB" in out
    assert "a page of kvcached up to 16 MiB" in out
    assert "8 requests of 1024 tokens: 32 MiB of the device, 32 MiB of the tier" in out
    assert "a tier of 1.0 GiB keeps 16384 blocks: 256 requests of 1024 tokens" in out
    assert "chat alone: 56 requests of 16384 tokens at a time" in out
    assert (
        f"KVPATCH=1 KVCACHED_IPC_NAME=chat KVPATCH_FIRST_LIMIT=1945MiB vllm serve {chat} "
        "--port 8000 --kv-offloading-size 1"
    ) in out
    assert f"vllm serve {code} --port 8001" in out


def test_two_engines_of_one_model_have_names_of_their_own(folder, capsys):
    """A second engine with the same name does not start; kvcached keeps no dots."""
    chat, *others = [str(folder(name)) for name in ("chat", "chat-2", "chat.2")]
    assert cli.main(["size", chat, chat, *others, "--dtype", "auto", "--json"]) == 0
    commands = json.loads(capsys.readouterr().out)["commands"]
    names = [word for one in commands for word in one.split() if "_NAME=" in word]
    assert [one.partition("=")[2] for one in names] == ["chat", "chat-2", "chat-2-2", "chat-2-3"]
    assert not [one for one in commands if "--dtype" in one]


def test_the_tier_of_the_requests_asked_for_is_in_the_command(folder, capsys):
    words = ["size", str(folder("chat")), "--tokens", "16384", "--requests", "20"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "20 requests of 16384 tokens: 1.2 GiB of the device, 1.2 GiB of the tier" in out
    assert "--kv-offloading-size 2\n" in out
    assert cli.main(words[:2]) == 0
    assert "--kv-offloading-size" not in capsys.readouterr().out


def test_a_longest_request_that_is_not_told_is_asked_for(folder, capsys):
    words = ["size", str(folder("chat", max_position_embeddings=None)), "--requests", "8"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "does not tell max_model_len: give --max-model-len" in out
    assert " requests of 0 tokens" not in out
    assert cli.main([*words, "--max-model-len", "16384"]) == 0
    assert "8 requests of 16384 tokens: " in capsys.readouterr().out


def test_what_an_engine_has_beyond_its_blocks(folder, capsys, monkeypatch):
    words = ["size", str(folder("chat")), "--device", "4GiB"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "beyond these blocks: up to 192 MiB of the device, the page of block 0, 10 pages" in out
    assert "for KV caches, 192 MiB beyond blocks, activations and CUDA graphs" in out
    assert "--port" not in out
    for none in ("0", "-30"):
        monkeypatch.setenv("KVCACHED_MAX_RESERVED_PAGES", none)
        assert cli.main([*words, "--json"]) == 0
        (one,) = json.loads(capsys.readouterr().out)["models"]
        assert one["beyond_bytes"] == 2 * one["page_bytes"] == 32 << 20
    monkeypatch.setenv("KVCACHED_GPU_UTILIZATION", "0.5")
    assert cli.main(words) == 0
    assert "a device of 4.0 GiB: 2.0 GiB, which is 50% without the" in capsys.readouterr().out


def test_as_json(folder, capsys):
    assert cli.main(["size", str(folder("chat") / "config.json"), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["models"]
    assert (one["token_bytes"], one["longest"]["device_bytes"]) == (4096, 64 << 20)


def test_a_model_that_is_not_there(tmp_path, capsys):
    assert cli.main(["size", str(tmp_path)]) == 2
    assert "nothing is downloaded" in capsys.readouterr().err
    assert cli.main(["size", str(tmp_path), "--json"]) == 2
    assert "nothing is downloaded" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("KVCACHED_PAGE_SIZE_MB", "3", "it is not a multiple of 2"),
        ("KVPATCH_HOST_DEVICE", "abc", "it is not a size"),
        ("KVCACHED_GPU_UTILIZATION", "2", "it is not a share"),
    ],
)
def test_a_variable_that_cannot_be_read(name, value, said, folder, capsys, monkeypatch):
    monkeypatch.setenv(name, value)
    assert cli.main(["size", str(folder("chat"))]) == 2
    assert f"kvpatch size: {name}={value} cannot be read: {said}" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tier", "--device"])
def test_a_size_without_its_unit_is_refused(option, capsys):
    with pytest.raises(SystemExit):
        cli.main(["size", "model", option, "64"])
    assert "64 is 64 B; use for example 64GiB" in capsys.readouterr().err
