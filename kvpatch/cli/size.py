"""``kvpatch size``: what the KV caches of models take, from their ``config.json`` alone."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kvpatch import environ, model_shape
from kvpatch.cli.verbs import count, parsed
from kvpatch.environ import (
    FIRST_LIMIT,
    HOST_DEVICE,
    KVCACHED_GPU_UTILIZATION,
    KVCACHED_IPC_NAME,
    KVCACHED_MAX_RESERVED_PAGES,
    KVCACHED_PAGE_SIZE_MB,
)
from kvpatch.model_shape import Shape, Unknown
from kvpatch.sizes import readable
from kvpatch.telemetry.printable import printable

SCHEMA = 1  # of --json
PORT = 8000  # vLLM's own
_Value = TypeVar("_Value")


class Model(NamedTuple):
    """One model that is asked for; weights are bytes on each rank, 0 where they are not there."""

    path: Path
    shape: Shape
    weights: int

    @property
    def name(self) -> str:
        """A name for its engine, as kvcached keeps it, with room for a number."""
        folder = self.path if self.path.suffix != ".json" else self.path.absolute().parent
        return re.sub(r"[^A-Za-z0-9_-]", "-", folder.absolute().name)[:56].lower() or "model"


def _size(text: str) -> int:
    """Return a size in bytes; a number alone is of GiB to vLLM, and refused if it is too small."""
    number = parsed(environ.size, text)
    if number < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text} is {readable(number)}; use for example 64GiB")
    return number


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "models", nargs="+", type=Path, metavar="MODEL", help="a model's folder, or its config.json"
    )
    parser.add_argument("--tier", type=_size, help="size of the CPU tier, for example 64GiB")
    parser.add_argument("--device", type=_size, help="memory of each device, for example 80GiB")
    parser.add_argument("--requests", type=count, metavar="N", help="requests at the same time")
    parser.add_argument("--tokens", type=count, metavar="N", help="tokens of each of them")
    parser.add_argument("--max-model-len", type=count, default=0, metavar="N", help="as of vLLM")
    parser.add_argument("--block-size", type=count, default=16, metavar="N", help="as of vLLM")
    parser.add_argument("--kv-cache-dtype", default="auto", metavar="TYPE", help="as of vLLM")
    parser.add_argument("--dtype", default="auto", help="as of vLLM")
    parser.add_argument(
        "-tp", "--tensor-parallel-size", type=count, default=1, metavar="N", help="as of vLLM"
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.epilog = (
        "Computed, not measured: nothing is loaded or started. Activations, CUDA graphs and what "
        "other processes have are not known, and are not counted. Exit status 2: a model's KV "
        "cache is not told from its configuration."
    )


def run(options: argparse.Namespace) -> int:
    """Print what the models take; return the exit code."""
    try:
        models = [asked_for(path, options) for path in options.models]
        page = setting(KVCACHED_PAGE_SIZE_MB, environ.page_size, 2) << 20
        device = options.device or setting(HOST_DEVICE, environ.size, 0)
        usable = setting(KVCACHED_GPU_UTILIZATION, environ.fraction, 0.95)  # kvcached's
    except Unknown as error:
        if options.json:
            print(json.dumps({"error": str(error)}))
        else:
            print(printable(f"kvpatch size: {error}"), file=sys.stderr)
        return 2
    said = [figures(one, options, page) for one in models]
    # What weights leave of a device for KV caches.
    beside = int(device * usable) - sum(one.weights for one in models)
    left = max(0, beside) if device else None
    tiers = [tier_of(options, one) for one in said]
    commands = [command(models, at, options, page, left, tiers[at]) for at in range(len(models))]
    if options.json:
        whole = {"schema": SCHEMA, "models": said, "left_bytes": left, "commands": commands}
        print(json.dumps(whole, indent=2))
        return 0
    parts = [text(model, one) for model, one in zip(models, said, strict=True)]
    if left is not None:
        beyond = sum(one["beyond_bytes"] for one in said)
        parts.append(on_device(models, device, usable, left, page, beyond))
    print("\n\n".join(parts))
    print("\ncommands\n" + "\n".join(f"  {printable(one)}" for one in commands))
    print("whether it would start: kvpatch doctor -- vllm serve MODEL ...")
    return 0


def asked_for(path: Path, options: argparse.Namespace) -> Model:
    """Return one model, or raise Unknown, which names it."""
    try:
        shape = model_shape.of(
            model_shape.read(path),
            block_tokens=options.block_size,
            cache=options.kv_cache_dtype,
            ranks=options.tensor_parallel_size,
            dtype="" if options.dtype == "auto" else options.dtype,
            longest=options.max_model_len,
        )
    except Unknown as error:
        raise Unknown(f"{path}: {error}") from error
    return Model(path, shape, model_shape.weights(path) // shape.ranks)


def setting(variable: environ.Variable, read: Callable[[str], _Value], unset: _Value) -> _Value:
    """Return what a variable means, or raise Unknown, which names it."""
    text = variable.read()
    try:
        return read(text) if text else unset
    except ValueError as error:
        raise Unknown(f"{variable}={text} cannot be read: {error}") from error


def figures(model: Model, options: argparse.Namespace, page: int) -> dict[str, Any]:
    """Return what one model takes, as JSON; bytes on the device are those of each rank."""
    shape = model.shape
    said: dict[str, Any] = {
        "model": str(model.path),
        "architecture": shape.name,
        "layers": shape.layers,
        "stored_in": shape.stored_in,
        "ranks": shape.ranks,
        "block_tokens": shape.block_tokens,
        "block_bytes": shape.block_bytes,
        "token_bytes": shape.token_bytes,
        "long_token_bytes": shape.long_token_bytes,
        "state_bytes": shape.state_bytes,
        "page_bytes": page * shape.pools,
        "weights_bytes": model.weights,
        "beyond_bytes": page * shape.pools * (ahead() + 2),
    }
    if shape.longest:
        said["longest"] = asked(shape, shape.longest, 1, page)
    tokens = options.tokens or (options.requests and shape.longest)
    if tokens:
        said["requests"] = asked(shape, tokens, options.requests or 1, page)
    if options.tier:
        of_tier = shape.block_bytes * shape.tier_ranks
        blocks = options.tier // of_tier
        tokens = options.tokens or shape.longest or shape.block_tokens
        said["tier"] = {
            "bytes": options.tier,
            "blocks": blocks,
            "tokens_of_a_request": tokens,
            "requests": options.tier // max(1, shape.in_tier(tokens)),
        }
    return said


def ahead() -> int:
    """Return the most pages that kvcached maps ahead of use; its default where it reads none."""
    try:
        return max(0, int(KVCACHED_MAX_RESERVED_PAGES.read() or 10))
    except ValueError:
        return 10


def asked(shape: Shape, tokens: int, requests: int, page: int) -> dict[str, int]:
    """Return what requests of a length take on the device and in a tier."""
    return {
        "tokens": tokens,
        "requests": requests,
        "device_bytes": shape.on_device(tokens, requests, page),
        "tier_bytes": shape.in_tier(tokens, requests),
    }


def text(model: Model, said: dict[str, Any]) -> str:
    """Return what one model takes, for a person."""
    shape, each = model.shape, " on each rank" if model.shape.ranks > 1 else ""
    kinds = ", ".join(f"{number} of {kind}" for kind, number in shape.layers.items())
    grows = f"{readable(shape.token_bytes)} per token{each}"
    if shape.long_token_bytes != shape.token_bytes:
        grows += f", {readable(shape.long_token_bytes)} beyond its windows"
    lines = [
        f"{model.path}: {shape.name}; layers: {kinds}; KV cache in {shape.stored_in}",
        f"  {grows}; a block of {shape.block_tokens} tokens has {readable(shape.block_bytes)}, "
        f"a page of kvcached up to {readable(said['page_bytes'])}",
    ]
    if shape.state_bytes:
        lines.append(f"  a state has {readable(shape.state_bytes)} in each layer of that kind")
    if not shape.longest:
        lines.append("  its configuration does not tell max_model_len: give --max-model-len")
    for key in ("longest", "requests"):
        if one := said.get(key):
            many = f"{one['requests']} requests" if one["requests"] > 1 else "one request"
            limit = " (max_model_len)" if key == "longest" else ""
            lines.append(
                f"  {many} of {one['tokens']} tokens{limit}: {readable(one['device_bytes'])} of "
                f"the device{each}, {readable(one['tier_bytes'])} of the tier"
            )
    if one := said.get("tier"):
        lines.append(
            f"  a tier of {readable(one['bytes'])} keeps {one['blocks']} blocks: "
            f"{one['requests']} requests of {one['tokens_of_a_request']} tokens"
        )
    lines.append(
        f"  beyond these blocks: up to {readable(said['beyond_bytes'])} of the device{each}, the "
        f"page of block 0, {ahead()} pages ahead of use and kvcached's zero page"
    )
    known = readable(model.weights) if model.weights else "not here, and counted as nothing"
    lines.append(f"  weights{each}: {known}")
    return "\n".join(lines)


def on_device(
    models: list[Model], device: int, usable: float, left: int, page: int, beyond: int
) -> str:
    """Return what a device has for the KV caches of all models, and what fits there."""
    lines = [
        f"a device of {readable(device)}: {readable(left)}, which is {usable * 100:g}% without "
        f"the weights, for KV caches, {readable(beyond)} beyond blocks, activations and CUDA graphs"
    ]
    for_blocks = max(0, left - beyond)
    for one in models:
        if longest := one.shape.longest:
            needs = one.shape.on_device(longest, 1, page)
            fits = for_blocks // needs
            lines.append(f"  {one.name} alone: {fits} requests of {longest} tokens at a time")
            beside = for_blocks - needs
            if len(models) > 1 and beside < 0:
                lines.append(f"  {one.name} needs {readable(needs)}: lower its --max-model-len")
            elif len(models) > 1:
                lines.append(
                    f"  beside one longest request of {one.name}, others have {readable(beside)}"
                )
    return "\n".join(lines)


def tier_of(options: argparse.Namespace, said: dict[str, Any]) -> float:
    """Return the GiB of a model's tier: as asked for, or as the requests need it; 0 for none."""
    if asked := options.tier:
        return float(asked) / (1 << 30)
    needed: int = said.get("requests", {}).get("tier_bytes", 0)
    return math.ceil(needed / (1 << 30))


def names(models: list[Model]) -> list[str]:
    """Return a name for each engine that no other has."""
    found: list[str] = []
    for model in models:
        numbered = (f"{model.name}-{number}" for number in itertools.count(2))
        tried = itertools.chain([model.name], numbered)
        found.append(next(one for one in tried if one not in found))
    return found


def command(
    models: list[Model],
    at: int,
    options: argparse.Namespace,
    page: int,
    left: int | None,
    tier: float,
) -> str:
    """Return the command that starts the engine of one of the models."""
    words, model = ["KVPATCH=1"], models[at]
    if len(models) > 1:
        words.append(f"{KVCACHED_IPC_NAME}={names(models)[at]}")
        if left is not None:
            longest = model.shape.on_device(model.shape.longest or 1, 1, page)
            first = max(left // len(models), longest) >> 20
            words.append(f"{FIRST_LIMIT}={first}MiB")
    folder = model.path if model.path.suffix != ".json" else model.path.parent
    words += ["vllm", "serve", shlex.quote(str(folder))]
    if len(models) > 1:
        words.append(f"--port {PORT + at}")
    if tier:
        words.append(f"--kv-offloading-size {tier:g}")
    for name, value, unset in (
        ("max-model-len", options.max_model_len, 0),
        ("block-size", options.block_size, 16),
        ("kv-cache-dtype", options.kv_cache_dtype, "auto"),
        ("dtype", options.dtype, "auto"),
        ("tensor-parallel-size", options.tensor_parallel_size, 1),
    ):
        if value != unset:
            words.append(f"--{name} {shlex.quote(str(value))}")
    return " ".join(words)
