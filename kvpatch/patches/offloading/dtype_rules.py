"""Dtypes of the KV cache that are refused with any of vLLM's connectors."""

from __future__ import annotations

from typing import Any

from kvpatch import admitted
from kvpatch.patches.offloading import place
from kvpatch.rules import Rule
from kvpatch.supported import FP8, in_ranges, is_validated, release_of, validated
from kvpatch.versions import Facts, Span

VALIDATED_CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32")
FP8_CACHE_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2")  # on the releases of ``supported.FP8``
# Where a checkpoint's kv_cache_scheme wins over --kv-cache-dtype, in vLLM's Attention.__init__.
SCHEME_WINS = Span("0", "0.22")
_FP8 = (
    f"on vLLM {in_ranges(validated(FP8))}, in all layers of a model of full attention alone and "
    "without --calculate-kv-scales, and of a hybrid one "
    + admitted.where("fp8", model=place.HYBRID)
)


def _has_scheme(config: Any) -> bool:
    """Return whether ``Attention.__init__`` makes the dtype ``auto`` fp8, by the same object."""
    scheme = getattr(getattr(config, "quant_config", None), "kv_cache_scheme", None)
    model = config.model_config
    return scheme is not None and not (model is not None and model.use_mla)


def _by_scheme(config: Any, facts: Facts) -> bool:
    """Return whether the dtype ``auto`` becomes fp8; up to 0.21 every dtype does, see KVP340."""
    obeys = release_of(facts.vllm) not in SCHEME_WINS
    return obeys and config.cache_config.cache_dtype == "auto" and _has_scheme(config)


def is_fp8(config: Any, facts: Facts) -> bool:
    """Return whether the KV cache is fp8, by the setting or by the checkpoint."""
    return _by_scheme(config, facts) or config.cache_config.cache_dtype in FP8_CACHE_DTYPES


def _other_dtype(config: Any, facts: Facts) -> bool:
    if is_fp8(config, facts):
        return not _validated_fp8(config, facts)
    return config.cache_config.cache_dtype not in VALIDATED_CACHE_DTYPES


def _validated_fp8(config: Any, facts: Facts) -> bool:
    """Return whether an fp8 KV cache was compared.

    That of all attention layers, of other models than those of full attention where it ran, with
    the scales of the checkpoint: scales that the first requests decide are those of one engine, and
    a secondary tier serves several. What is beside it, such as several ranks, is in pairs.
    """
    cache, kind = config.cache_config, place.kind_of(config.model_config)
    return (
        is_validated(facts.vllm, FP8)
        and (kind == place.FULL or place.starts_with("fp8", config, facts))
        and not getattr(cache, "calculate_kv_scales", False)
        and not getattr(cache, "kv_cache_dtype_skip_layers", ())
    )


def _cache_dtype(config: Any, facts: Facts) -> str:
    """Return the dtype of the KV cache, with what it was not compared with."""
    by = ", by the checkpoint's kv_cache_scheme," if _by_scheme(config, facts) else ""
    name = f"fp8{by}" if by else str(config.cache_config.cache_dtype)
    if not is_fp8(config, facts):
        return name
    kind = place.kind_of(config.model_config)
    if kind not in ("", place.FULL):
        return f"{name} for a model that is not of full attention alone ({kind})"
    if getattr(config.cache_config, "calculate_kv_scales", False):
        return f"{name} and --calculate-kv-scales"
    if getattr(config.cache_config, "kv_cache_dtype_skip_layers", ()):
        return f"{name} in some of the layers"
    return name.rstrip(",")


RULES = (
    Rule(  # before the next rule, whose remedy is of no use there
        "KVP340",
        "offloading of checkpoints with a `kv_cache_scheme` before vLLM 0.22",
        lambda config, facts: _has_scheme(config),
        "a KV connector is configured for a checkpoint with a kv_cache_scheme",
        "before vLLM 0.22 that makes its KV cache fp8 whatever --kv-cache-dtype says, which has "
        "not been validated by a store and load round trip",
        "install vLLM 0.22.1 and set --kv-cache-dtype bfloat16, or take kv_cache_scheme out of "
        "the checkpoint's config.json",
        only_in=SCHEME_WINS,
    ),
    Rule(
        "KVP310",
        "offloading with KV cache dtypes other than the ones above, also where the checkpoint "
        f"asks for it (`kv_cache_quant_algo`, `kv_cache_scheme`); fp8 except {_FP8}",
        _other_dtype,
        lambda config, facts: (
            "a KV connector is configured with the KV cache dtype " + _cache_dtype(config, facts)
        ),
        f"of all dtypes that are not a model's own only fp8 is validated, {_FP8} (with latent "
        "attention plain vLLM's CPU build ends with `--kv-cache-dtype fp8 is not supported by MLA "
        "attention on CPU`)",
        "set --kv-cache-dtype bfloat16, and --dtype bfloat16 if the model is not (auto takes "
        "what the checkpoint asks for)",
    ),
)
