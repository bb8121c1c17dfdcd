"""The KV cache of a model, from its ``config.json`` alone: what vLLM makes of it, without vLLM.

Layers of one kind are in groups of as many layers as the rarest kind has, and every group takes
blocks of the same bytes from one pool (vLLM's ``kv_cache_utils``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FULL, WINDOW, LATENT, STATE = "full attention", "sliding windows", "latent attention", "states"
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}
CACHES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16")  # of one size per element
_WINDOWED = ("sliding_attention", "chunked_attention", "local_attention")
_STATES = ("linear_attention", "mamba", "mamba2")
_NO_CACHE = ("mlp", "moe", "-", "E")
_WHOLE = ("full_attention", "attention", "global_attention", "indexed_attention")
_LENGTHS = ["max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "seq_len"]
_LENGTHS += ["max_target_positions", "max_sequence_length", "max_seq_length"]
_SCALED = ("llama3", "deepseek_yarn", "deepseek_llama_scaling")  # RoPE whose length has the factor
_TILE = 128  # values in fp8 that have a scale together
# Every how many layers one is full, 0 for never, of models whose configurations may not say it.
_FULL_EVERY = {"cohere2": 4, "gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "llama4_text": 4}
_FULL_EVERY |= dict.fromkeys(("ministral", "ministral3", "mistral", "mixtral", "phi3"), 0)
_FULL_EVERY |= dict.fromkeys(("phi4mm", "phimoe", "qwen3_moe", "starcoder2"), 0)
_PATTERN = {"M": "mamba", "*": "full_attention", "-": "mlp", "E": "moe"}  # of Nemotron-H


class Unknown(ValueError):
    """A model whose KV cache is not told from its configuration; the message is one sentence."""


@dataclass(frozen=True)
class Group:
    """Layers that share a table of blocks; of ``WINDOW``, the window is in tokens."""

    kind: str
    window: int = 0

    def blocks(self, tokens: int, block_tokens: int) -> int:
        """Return the blocks that a request of ``tokens`` keeps."""
        if self.kind == STATE:
            return min(2, math.ceil(tokens / block_tokens))  # this one, and the last to be reused
        if self.kind == WINDOW and tokens > self.window:
            return math.ceil((self.window - 1) / block_tokens) + 1
        return math.ceil(tokens / block_tokens)


@dataclass(frozen=True)
class Shape:
    """The KV cache of a model on one rank."""

    name: str  # its architecture
    layers: dict[str, int]  # with a KV cache, of each kind
    block_tokens: int
    block_bytes: int  # all layers of a group, on each rank
    # Of which a kvcached page has one part each: K and V of the layers of a group; half as many
    # where kvcached keeps K and V of a layer together, as on Model Runner V2.
    pools: int
    groups: tuple[Group, ...]
    longest: int  # tokens of the longest request; 0 where the configuration does not tell
    tier_ranks: int = 1  # whose bytes a CPU tier of OffloadingConnector has
    ranks: int = 1
    state_bytes: int = 0  # that each layer with a state keeps; 0 without one
    stored_in: str = ""  # the type of K and V

    @property
    def token_bytes(self) -> int:
        """Bytes of one more token within every window, on each rank."""
        growing = sum(group.kind != STATE for group in self.groups)
        return self.block_bytes * growing // self.block_tokens

    @property
    def long_token_bytes(self) -> int:
        """Bytes of one more token of a long request, on each rank."""
        growing = sum(group.kind in (FULL, LATENT) for group in self.groups)
        return self.block_bytes * growing // self.block_tokens

    def blocks(self, tokens: int) -> int:
        """Return the blocks that a request of ``tokens`` keeps, of all groups."""
        return sum(group.blocks(tokens, self.block_tokens) for group in self.groups)

    def on_device(self, tokens: int, requests: int = 1, page: int = 2 << 20) -> int:
        """Return the bytes that requests of some tokens map on each device, in kvcached's pages."""
        per_page = max(1, page * self.pools // self.block_bytes)
        return math.ceil(requests * self.blocks(tokens) / per_page) * page * self.pools

    def in_tier(self, tokens: int, requests: int = 1) -> int:
        """Return the bytes of requests in a CPU tier, of all ranks; it keeps more than a window."""
        kept = 0
        for group in self.groups:
            kind = FULL if group.kind == WINDOW else group.kind
            kept += Group(kind).blocks(tokens, self.block_tokens)
        return requests * kept * self.block_bytes * self.tier_ranks


def read(path: Path) -> dict[str, Any]:
    """Return the configuration of a language model, of a file or its folder, or raise Unknown."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise Unknown(
            f"{file} cannot be read ({error}): a model's folder here, or its config.json, is "
            "needed; nothing is downloaded"
        ) from error
    if not isinstance(config, dict):
        raise Unknown(f"{file} is no configuration of a model")
    inner = config.get("text_config") or config.get("llm_config")
    if not isinstance(inner, dict):
        return config
    return {"architectures": config.get("architectures"), "dtype": _dtype(config)} | inner


@contextmanager
def _values() -> Iterator[None]:
    """Raise Unknown of values that no configuration of a model has."""
    try:
        yield
    except Unknown:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise Unknown(f"the configuration has a value of another kind ({error})") from error


@_values()
def of(
    config: dict[str, Any],
    *,
    block_tokens: int = 16,
    cache: str = "auto",
    ranks: int = 1,
    dtype: str = "",
    longest: int = 0,
) -> Shape:
    """Return the KV cache of a configuration, which vLLM's options override, or raise Unknown."""
    name = str((config.get("architectures") or [config.get("model_type", "the model")])[0])
    if cache not in CACHES:
        raise Unknown(f"KV caches in {cache} are not known; there are {', '.join(CACHES)}")
    computed = dtype or _dtype(config) or "bfloat16"
    if computed not in BYTES:
        raise Unknown(f"{name} computes in {computed}, which is not known")
    if computed == "float32" and not dtype:
        computed = "bfloat16"  # as vLLM chooses
    stored_in = computed if cache == "auto" else cache
    element = BYTES.get(stored_in, 1)
    if config.get("compress_rates") or config.get("compress_ratios"):
        raise Unknown(f"{name} keeps windows of latents, which kvcached does not take")
    kinds = _kinds(config)
    longest = longest or _longest(config)
    latent, indexed = config.get("kv_lora_rank"), config.get("index_topk")
    if latent:
        per_token = {FULL: _latents(config, element)}
        kinds = {FULL: sum(kinds.values())} if WINDOW not in kinds and STATE not in kinds else kinds
    else:
        per_token = {kind: 2 * size * element for kind, size in _heads(config, ranks).items()}
    attends = [kind for kind in (FULL, WINDOW) if kinds.get(kind)]
    if not attends:
        raise Unknown(f"{name} has no layer with attention, whose KV cache kvcached would have")
    largest = max(per_token[kind if kind in per_token else FULL] for kind in attends)
    state = _state(config, name, ranks, BYTES[computed]) if kinds.get(STATE) else 0
    if state:
        block_tokens *= max(1, math.ceil(state / (block_tokens * largest)))
    counts = [count for count in kinds.values() if count]
    size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    window = int(_first(config, "sliding_window", "attention_chunk_size") or 0)
    groups: list[Group] = []
    for kind, count in kinds.items():
        shown = LATENT if latent and kind == FULL else kind
        one = Group(shown, window if kind == WINDOW else 0)
        groups += [one] * math.ceil(count / size)
    layers = {(LATENT if latent and kind == FULL else kind): n for kind, n in kinds.items() if n}
    return Shape(
        name=name,
        layers=layers,
        block_tokens=block_tokens,
        block_bytes=size * largest * block_tokens,
        pools=size * (1 if latent and not indexed else 2),
        groups=tuple(groups),
        longest=longest,
        tier_ranks=1 if latent else ranks,
        ranks=ranks,
        state_bytes=state,
        stored_in=stored_in,
    )


def _dtype(config: dict[str, Any]) -> str:
    named = config.get("dtype") or config.get("torch_dtype") or ""
    return str(named).removeprefix("torch.")


def _first(config: dict[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _longest(config: dict[str, Any]) -> int:
    """Return the max_model_len that vLLM chooses; 0 where it is not told, or releases differ."""
    told = [config[name] for name in _LENGTHS if config.get(name) is not None]
    longest = int(config.get("model_max_length") or min(told, default=0))
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor, trained = 1.0, config.get("original_max_position_embeddings")
    for one in [one for one in rope.values() if isinstance(one, dict)] or [rope]:
        kind = one.get("rope_type") or one.get("type")
        original = one.get("original_max_position_embeddings")
        if kind in ("su", "longrope"):
            return int(trained or (longest if original == longest else 0))
        if kind == "yarn":  # some releases scale the original length, others nothing
            if (trained or original or longest) * one.get("factor", 1) != longest:
                return 0
        elif kind not in _SCALED:
            factor = one.get("factor") or factor
    return int(longest * (1 if "gemma3" in str(config.get("model_type")) else factor))


def _kinds(config: dict[str, Any]) -> dict[str, int]:
    count = _first(config, "num_hidden_layers", "n_layer", "num_layers")
    types = config.get("layer_types") or config.get("layers_block_type")
    if types is None and config.get("hybrid_override_pattern"):
        types = [_PATTERN.get(one, one) for one in config["hybrid_override_pattern"]]
    if types is None and not isinstance(count, int):
        raise Unknown("the configuration does not say how many layers the model has")
    if types is None and config.get("full_attention_interval"):
        types = _interval(count, int(config["full_attention_interval"]), "linear_attention")
    if types is None and any("mamba" in name or "ssm" in name for name in config):
        raise Unknown("the configuration does not say which layers have states (layer_types)")
    if types is None:
        types = _windowed(config, count)
    shared = int(config.get("num_kv_shared_layers") or 0)
    found: dict[str, int] = {}
    for one in types[: len(types) - shared]:
        if one in _NO_CACHE:
            continue
        if one in _STATES:
            kind = STATE
        elif one in _WINDOWED:
            kind = WINDOW
        elif one in _WHOLE:
            kind = FULL
        else:
            raise Unknown(f"layers of the type {one} are not known")
        found[kind] = found.get(kind, 0) + 1
    return found


def _windowed(config: dict[str, Any], count: int) -> list[str]:
    """Return the types of layers of a configuration that does not list them."""
    model = str(config.get("model_type"))
    window = _first(config, "sliding_window", "attention_chunk_size")
    # transformers' default, of which only that of Qwen's models is off
    if not (window and config.get("use_sliding_window", not model.startswith("qwen"))):
        return ["full_attention"] * count
    every = config.get("sliding_window_pattern") or _FULL_EVERY.get(model)
    if model == "llama4_text":
        if rotated := config.get("no_rope_layers"):
            return ["chunked_attention" if one else "full_attention" for one in rotated]
        every = config.get("no_rope_layer_interval") or every
    if every is None:
        raise Unknown("the configuration does not say which layers have windows (layer_types)")
    return _interval(count, int(every), _WINDOWED[0])


def _interval(count: int, every: int, rest: str) -> list[str]:
    """Return the types of layers of which one of ``every`` is full, and the last one of these."""
    last = every - 1
    return ["full_attention" if every and one % every == last else rest for one in range(count)]


def _heads(config: dict[str, Any], ranks: int) -> dict[str, int]:
    """Return the elements of K of a token and layer on each rank, by kind."""
    heads = int(_first(config, "num_attention_heads", "n_head") or 0)
    hidden = int(_first(config, "hidden_size", "n_embd") or 0)
    kv_heads = int(_first(config, "num_key_value_heads") or heads)
    size = config.get("head_dim") or (hidden // heads if heads else 0)
    if not (size and kv_heads):
        raise Unknown("the configuration has no heads of attention")
    found = {kind: _of_rank(kv_heads, ranks) * int(size) for kind in (FULL, WINDOW)}
    others = [
        one["head_dim"]
        for one in (config.get("per_layer_config") or {}).values()
        if isinstance(one, dict) and "head_dim" in one
    ]
    wide = config.get("global_head_dim") or max(others, default=None)
    if wide:
        wide_heads = int(config.get("num_global_key_value_heads") or kv_heads)
        found[FULL] = _of_rank(wide_heads, ranks) * int(wide)
    return found


def _latents(config: dict[str, Any], element: int) -> int:
    """Return the bytes of a token and layer of latent attention, with those of its indexer.

    An indexer keeps bytes with a scale for each ``_TILE``. In fp8 vLLM packs the latents so, beside
    the rest in bfloat16, where an indexer chooses among them.
    """
    latent, rest = int(config["kv_lora_rank"]), int(config.get("qk_rope_head_dim") or 0)
    if not config.get("index_topk"):
        return (latent + rest) * element
    keys = int(config.get("index_head_dim") or _TILE)
    packed = [size + size // _TILE * BYTES["float32"] for size in (latent, keys)]
    latents = packed[0] + rest * BYTES["bfloat16"] if element == 1 else (latent + rest) * element
    return latents + packed[1]


def _of_rank(heads: int, ranks: int) -> int:
    return max(1, heads // ranks)


def _state(config: dict[str, Any], name: str, ranks: int, element: int) -> int:
    """Return the bytes of the state of a layer on each rank, as vLLM shapes it."""

    def number(*names: str) -> int:
        value = _first(config, *names)
        return int(value) if isinstance(value, (int, float)) else 0

    kernel = number("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim", "mamba_conv_kernel")
    if config.get("linear_num_value_heads"):
        k_heads, v_heads = number("linear_num_key_heads"), number("linear_num_value_heads")
        k_size, v_size = number("linear_key_head_dim"), number("linear_value_head_dim")
        conv = 2 * k_heads * k_size + v_heads * v_size
        temporal = v_heads * v_size * k_size
    else:
        heads = number("mamba_n_heads", "mamba_num_heads")
        size = number("mamba_d_head", "mamba_head_dim")
        state = number("mamba_d_state", "ssm_state_size", "state_size")
        groups = max(number("mamba_n_groups", "n_groups"), 1)
        groups = ranks if groups == 1 else groups
        conv = heads * size + 2 * groups * state
        temporal = heads * size * state
    if not (kernel and temporal):
        raise Unknown(f"{name} has states of a kind that is not known")
    ssm = str(config.get("mamba_ssm_dtype") or "")
    return (kernel - 1) * (conv // ranks) * element + temporal // ranks * BYTES.get(ssm, element)


def weights(path: Path) -> int:
    """Return the bytes of a model's weights; 0 where they are not beside its configuration."""
    folder = path if path.is_dir() else path.parent
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            return int(json.loads(index.read_text())["metadata"]["total_size"])
        return sum(one.stat().st_size for one in folder.glob("*.safetensors"))
    except (OSError, ValueError, KeyError, TypeError):
        return 0
