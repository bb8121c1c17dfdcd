"""The device of the demo, and the servers of the two models: three ways to have it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import connectors
from harness.bench.two_models import FIRST, KEEPS_NOTHING, SECOND
from harness.processes import ONE_THREAD
from harness.serve import Kind, arguments

DEVICE_PAGE = 2 << 20
BLOCK_TOKENS = 32
# Pages that kvcached maps ahead of use, 5 to 10 by default: most of a device as small as this.
NO_SPARE_PAGES = {"KVCACHED_MIN_RESERVED_PAGES": "0", "KVCACHED_MAX_RESERVED_PAGES": "0"}
# What an engine without a request has mapped: the page of block 0, which is never given back,
# and the page that all unmapped addresses show.
IDLE_PAGES = 2
MODELS = (FIRST, SECOND)


@dataclass(frozen=True)
class Device:
    """A device on which one model's peak fits and two do not.

    Attributes:
        page_bytes: of a page of kvcached, which has a page of the device in every layer.
        block_bytes: of a block of the KV cache, in float32.
        pages: of the whole device; an even number.
        longest: tokens of the longest request.
        together: requests at a peak.
    """

    page_bytes: int
    block_bytes: int
    pages: int
    longest: int
    together: int

    @classmethod
    def of(cls, model: Path, longest: int, together: int) -> Device:
        """Return the device for so many requests of so many tokens at a peak."""
        config = json.loads((model / "config.json").read_text())
        layers, heads = config["num_hidden_layers"], config["num_key_value_heads"]
        page_bytes = layers * DEVICE_PAGE
        block_bytes = layers * 2 * heads * config["head_dim"] * 4 * BLOCK_TOKENS
        blocks = together * math.ceil(longest / BLOCK_TOKENS) + 1
        peak = math.ceil(blocks / (page_bytes // block_bytes)) + 1
        pages = peak + IDLE_PAGES + 1
        return cls(page_bytes, block_bytes, pages + pages % 2, longest, together)

    @property
    def size(self) -> int:
        """Bytes of the device."""
        return self.pages * self.page_bytes

    @property
    def half(self) -> int:
        """Bytes of a static half."""
        return self.size // 2

    @property
    def idle(self) -> int:
        """Bytes that an engine without a request has mapped."""
        return IDLE_PAGES * self.page_bytes

    @property
    def tier_gib(self) -> str:
        """GiB of one model's CPU tier: all that it has at its peak, and a quarter more."""
        blocks = self.together * math.ceil(self.longest / BLOCK_TOKENS)
        return f"{math.ceil(blocks * self.block_bytes * 5 / (1 << 30)) / 4:.2f}"

    def arguments(self, size: int) -> dict[str, str]:
        """Return the arguments of ``vllm serve`` for a KV cache of ``size`` bytes."""
        longest = math.ceil(self.longest / 1024) * 1024
        return arguments(size // self.block_bytes, BLOCK_TOKENS, longest, self.together)


@dataclass(frozen=True)
class Way:
    """One way for two models to have a device.

    Attributes:
        name: in messages and in the report.
        slug: in the names of its files.
        arguments, environment: of a server, besides those of all.
        elastic: whether the models share the device; else each has a half.
    """

    name: str
    slug: str
    arguments: Callable[[Device], dict[str, str]]
    environment: Callable[[Device], dict[str, str]]
    elastic: bool = False

    def kind(self, device: Device, model: str) -> Kind:
        """Return the server of a model."""
        size = device.size if self.elastic else device.half
        return Kind(
            f"{self.name}, {model} model",
            f"{self.slug}-{model}",
            device.arguments(size) | self.arguments(device),
            ONE_THREAD | self.environment(device),
        )


def _own_tier(device: Device) -> dict[str, str]:
    """Return the connector of vLLM's own CPU tier: what it calls is the host device's."""
    config = connectors.offloading(int(float(device.tier_gib) * (1 << 30)), without_kvpatch=True)
    return {"kv-transfer-config": json.dumps(config)}


PLAIN = Way("plain vLLM", "plain", lambda _: {}, lambda _: {"KVPATCH": "0"})
TIERED = Way("plain vLLM with its tier", "tier", _own_tier, PLAIN.environment)
KVPATCH = Way(
    "kvpatch",
    "kvpatch",
    lambda device: {"kv-offloading-size": device.tier_gib},
    lambda device: {
        "KVPATCH": "1",
        **NO_SPARE_PAGES,
        **KEEPS_NOTHING,
        "KVPATCH_HOST_DEVICE": str(device.size),
        # vLLM's share of a device is of its whole; what is free decides.
        "KVCACHED_GPU_UTILIZATION": "1.0",
    },
    elastic=True,
)
