"""Whether a command of vLLM would start: its options and configuration, without an engine.

Run in a process of its own, in which kvpatch is on: vLLM's parser reads the options, vLLM makes
its configuration of them, and every rule is asked. vllm is imported by ``examined``, and by nothing
else here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from kvpatch import environ, model_shape, rules
from kvpatch.environ import FIRST_LIMIT
from kvpatch.refusal import CODES, Refusal
from kvpatch.sizes import readable
from kvpatch.status import record

MOST = 30  # options that are looked at one after another, each without those before it
SHORT = 400  # characters of a message of vLLM's

Wrong = tuple[str, str, str]  # what, remedy, code


class _Said(Exception):
    """What vLLM's parser would print before it exits."""


def words_of(command: Sequence[str]) -> list[str]:
    """Return the words after ``vllm`` or ``python -m ...api_server``; ValueError without either."""
    program = Path(command[0]).name if command else ""
    if program == "vllm":
        words = list(command[1:])
    elif program.startswith("python") and list(command[1:2]) == ["-m"]:
        module, words = command[2:3], list(command[3:])
        if list(module) == ["vllm.entrypoints.openai.api_server"]:
            words = ["serve", *words]
        elif list(module) not in (["vllm"], ["vllm.entrypoints.cli.main"]):
            words = []
    else:
        words = []
    if words[:1] != ["serve"]:
        raise ValueError("it is not vllm serve; write kvpatch doctor -- vllm serve MODEL ...")
    return words


def examined(words: Sequence[str]) -> dict[str, Any]:
    """Return what stops a command, from ``serve`` on; everything that can be seen at once."""
    import vllm

    from kvpatch import activation

    said: dict[str, Any] = {
        "patches": len(activation.transaction.applied),
        "vllm": vllm.__version__,
        "wrong": [],
        "warnings": [],
        "accepted": "",
    }
    arguments, wrong = parsed(words)
    said["wrong"] += wrong
    if arguments is None:
        return said
    record.lifted = frozenset(CODES)  # asked below, all of them
    try:
        config = configuration(arguments)
    except Exception as error:
        said["wrong"] += [(f"vLLM does not take it: {one}", "", "") for one in messages(error)]
        return said
    said["wrong"] += [(str(one), "", one.code) for one in broken(config, said["warnings"])]
    said["wrong"] += [*first_limit(config), *disks(config, said["warnings"])]
    if not said["wrong"]:
        said["accepted"] = summary(config)
    return said


def parsed(words: Sequence[str]) -> tuple[Any, list[Wrong]]:
    """Return the options that vLLM's parser reads, or None, and every one that it cannot."""
    from vllm.entrypoints.cli import serve

    class Parser(serve.FlexibleArgumentParser):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise _Said(message)

        def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
            raise _Said(message or "it prints help and ends")

    parser = Parser(description="vLLM CLI")
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    (command,) = serve.cmd_init()
    own = command.subparser_init(subparsers)
    options = [name for name in own._option_string_actions if name.startswith("--")]
    rest, wrong = list(words), []
    for _ in range(MOST):
        try:
            arguments = parser.parse_args(list(rest))
        except _Said as said:
            message = str(said)
            left, what = without(rest, message, options)
            wrong += what
            if left is None or left == rest:
                return None, wrong
            rest = left
            continue
        except Exception as error:
            return None, [*wrong, *((one, "", "") for one in messages(error))]
        try:
            command.validate(arguments)
        except Exception as error:
            wrong += [(one, "", "") for one in messages(error)]
        if getattr(arguments, "model_tag", None) is not None:
            arguments.model = arguments.model_tag
        return arguments, wrong
    return None, wrong


def without(
    words: list[str], message: str, options: Sequence[str]
) -> tuple[list[str] | None, list[Wrong]]:
    """Return the words, or None, without those that argparse's message names, and what is wrong."""
    if "unrecognized arguments: " in message:
        strange = message.partition("unrecognized arguments: ")[2].split()
        named = [one.partition("=")[0] for one in strange if one.startswith("--")]
        if not named:
            return None, [(f"vLLM does not read {' '.join(strange)[:SHORT]}", "", "")]
        return _dropped(words, named), [_unknown(one, options) for one in named]
    found = re.match(r"argument ([^\s:]+)", message)
    wrong = [(message[:SHORT], "", "")]
    return (_dropped(words, found[1].split("/")) if found else None), wrong


def _dropped(words: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return words without some options, each with the values that follow it."""
    kept, dropped = [], False
    unwanted = set(map(_dashed, names))
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("-"):
            dropped = _dashed(name) in unwanted
        if not dropped:
            kept.append(word)
        elif equals:
            dropped = False  # its value is in the same word
    return kept


def _dashed(word: str) -> str:
    return word.replace("_", "-") if word.startswith("--") else word


def _unknown(name: str, options: Sequence[str]) -> Wrong:
    near = get_close_matches(_dashed(name), options, n=1, cutoff=0.75)
    return f"vLLM has no option {name}", f"did you mean {near[0]}?" if near else "", ""


def configuration(arguments: Any) -> Any:
    """Return the ``VllmConfig`` of parsed options, as the API server makes it."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    return AsyncEngineArgs.from_cli_args(arguments).create_engine_config(
        usage_context=UsageContext.OPENAI_API_SERVER
    )


def messages(error: Exception) -> list[str]:
    """Return an error in lines; pydantic's has one for each field."""
    many = getattr(error, "errors", None)
    if callable(many):
        return [
            ".".join(map(str, one.get("loc", ()))) + f"{': ' if one.get('loc') else ''}{one['msg']}"
            for one in many()
        ]
    return [" ".join(str(error).split())[:SHORT] or type(error).__name__]


def broken(config: Any, warnings: list[str]) -> list[Refusal]:
    """Return every refusal of a configuration; warnings of the rules that it keeps are added."""
    from kvpatch.patches.elastic_memory import configuration as ours

    facts = ours.facts_of_engine()._replace(readings={})
    skipped = record.verified.codes if record.verified else frozenset()
    every = [rule for rule in rules.of(record.rules) if rule.code not in skipped]
    found = list(rules.refusals(config, facts, every))
    if not found:
        warnings += rules.warnings(config, facts, every)
    return found


def first_limit(config: Any) -> Iterator[Wrong]:
    """Yield a first limit that is less than one request needs, as the engine says at its start."""
    asked, model = FIRST_LIMIT.read(), config.model_config
    size = environ.share(asked).size if asked else 0
    if not size:
        return
    with suppress(model_shape.Unknown):
        needed = model_shape.of(
            model.hf_text_config.to_dict(),
            block_tokens=config.cache_config.block_size or 16,
            cache=str(config.cache_config.cache_dtype),
            ranks=config.parallel_config.tensor_parallel_size,
            dtype=str(model.dtype).removeprefix("torch."),
        ).on_device(model.max_model_len)
        if size < needed:
            yield (
                f"{FIRST_LIMIT} is {asked}, and a request of {model.max_model_len} tokens needs "
                f"{readable(needed)}: it would wait for ever",
                f"set {FIRST_LIMIT} to more than that, or a smaller --max-model-len",
                "KVP424",
            )


def disks(config: Any, warnings: list[str]) -> Iterator[Wrong]:
    """Yield what keeps the folders of secondary tiers from being used; nothing is made."""
    from kvpatch.upstream import connectors

    for leaf in connectors.leaves(config.kv_transfer_config):
        for tier in leaf.tiers:
            root = tier.get("root_dir")
            if tier.get("type") != "fs" or not root:
                continue
            wanted = Path(root).absolute()
            there = next(one for one in (wanted, *wanted.parents) if one.exists())
            disk = shutil.disk_usage(there)  # of nothing, in a folder of the kernel's
            if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK) and disk.total):
                yield (
                    f"the folder {root} of a secondary tier cannot be used: nothing can be "
                    f"written to {there}",
                    "give root_dir a folder that this user can write to",
                    "KVP334",
                )
            elif disk.free < disk.total // 20:
                warnings.append(
                    f"the disk of {root} has {readable(disk.free)} free of {readable(disk.total)}: "
                    "blocks that do not fit are computed again"
                )


def summary(config: Any) -> str:
    """Return what would start, in one line."""
    from kvpatch.patches.elastic_memory import configuration as ours
    from kvpatch.patches.offloading import cpu_tier
    from kvpatch.upstream import connectors

    model = config.model_config
    words = [f"{model.model} in {str(model.dtype).removeprefix('torch.')}"]
    words.append(f"requests of up to {model.max_model_len} tokens")
    words.append(f"KV cache in {config.cache_config.cache_dtype}")
    ranks = config.parallel_config.world_size
    if ranks > 1:
        words.append(f"{ranks} ranks")
    leaves = connectors.leaves(config.kv_transfer_config)
    if not leaves:
        words.append("no offloading: set --kv-offloading-size GIB to keep evicted prefixes")
    for leaf in leaves:
        tiers = "".join(f" and {one.get('type')}" for one in leaf.tiers)
        words.append(f"{leaf.name}{tiers}")
    if leaves:
        asked = sum(one.asked for one in cpu_tier.of(config, ours.facts_of_engine()))
        words.append(f"a CPU tier of {readable(asked)}")
    return ", ".join(words)


def main(words: Sequence[str]) -> None:
    """Print what ``examined`` returns as the last line."""
    print("\n" + json.dumps(examined(words)))
