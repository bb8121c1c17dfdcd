"""Cells whose engine gives its memory back between questions: suspended, and when it is idle."""

import json
import os
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.engines import plugins
from harness.engines.runs import BLOCK, Device, Run, block_tokens, engine_arguments, prompts
from harness.engines.serving import eventually
from harness.evidence import of_run
from harness.kills import Served
from kvpatch import control
from kvpatch.environ import IDLE

COUNT = 8  # prompts, which the device and the tier can keep, and which fill more than a page
BLOCKS = 300  # of the device
SECONDS = 120  # in which an engine starts, and in which it gives its memory back
LOADED = "vllm:external_prefix_cache_hits_total"


def run(wanted: Run, folder: Path, executed: Path, asked: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask a server, let it give its memory back by a suspension and at idle, and ask it again.

    Returns:
        The ``answers`` before and after each, the tokens that came ``from_tier``, and
        the pages that were ``mapped`` when it was full, suspended and idle; or how it ``failed``.
    """
    name = f"giving{os.getpid()}-{time.monotonic_ns()}"
    more = {"KVCACHED_IPC_NAME": name, IDLE.name: "2s", "KVPATCH_DEBUG": "1"}
    here = replace(
        wanted,
        blocks=max(BLOCKS * block_tokens(wanted) // BLOCK, wanted.blocks),
        cpu_blocks=0,
        environment=(*wanted.environment, *more.items()),
    )
    recorded = of_run.recording(executed, Device(folder).environ(here))
    recorded[plugins.KERNELS] = json.dumps(engine_arguments(here), default=str)
    wanted_plugins = [plugins.lift_what_did_not_run.__name__, plugins.bring_kernels.__name__]
    if wanted.asynchronous:
        wanted_plugins.append(plugins.schedule_asynchronously.__name__)
    place = plugins.install(folder / f"plugins{time.monotonic_ns()}", *wanted_plugins)
    recorded["PYTHONPATH"] = os.pathsep.join((place, recorded["PYTHONPATH"]))
    device = Device(folder / "device", environment=recorded)
    device.folder.mkdir(parents=True, exist_ok=True)
    with closing(Served(folder / f"served{time.monotonic_ns()}", here, device, {})) as server:
        if not eventually(server.ready, SECONDS):
            return {"failed": server.log[-3000:]}
        return {**_give(server, name, asked), "elastic": "KV on elastic memory: yes" in server.log}


def _give(server: Served, name: str, asked: list[dict[str, Any]]) -> dict[str, Any]:
    def answers() -> list[list[int]]:
        return [server.complete(one)["tokens"] for one in asked]

    def mapped() -> int:
        return int(control.find(name).said["mapped"])

    found: dict[str, Any] = {"answers": [answers()], "mapped": [mapped()]}
    engine = control.find(name)
    if why_not := engine.said["why_not"]:
        return {"failed": why_not}
    answer = engine.suspend(timeout=SECONDS)
    found["mapped"].append(answer.mapped)
    found["lost"], found["least"] = answer.lost, answer.limit  # the page of block 0
    found["kept"], found["partial"] = answer.kept, answer.partial
    engine.resume()
    found["answers"].append(answers())
    full = found["mapped"][0]
    eventually(lambda: mapped() < full, SECONDS)
    found["mapped"].append(mapped())
    found["answers"].append(answers())
    found["from_tier"] = int(server.metric(LOADED))
    return found


def judge(found: Mapping[str, Any], plain: Mapping[str, Any], caches: bool) -> dict[str, Any]:
    """Return whether nothing was lost: the answers, the memory and what came from the tier.

    Args:
        caches: whether the device has a prefix cache; without one, nothing is on it between
            questions, and nothing has to be stored for a suspension.
    """
    for who, one in (("plain vLLM", plain), ("kvpatch", found)):
        if "failed" in one:
            return {"right": False, "why": f"{who} failed: {one['failed'].splitlines()[-1]}"}
    expected = [one["tokens"] for one in plain["rounds"][0][:COUNT]]
    same = sum(one == expected for one in found["answers"])
    full, suspended, idle = found["mapped"]
    record = {
        "same_rounds": same,
        "rounds": len(found["answers"]),
        "tokens_from_tier": found["from_tier"],
        "pages": [full, suspended, idle],
        "blocks": [found["kept"], found["partial"]],
    }
    right = (
        same == len(found["answers"]) == 3
        and found["lost"] == 0
        and (found["partial"] < found["kept"] or not caches)  # ends of prompts that fill no chunk
        and suspended == found["least"] < full
        and idle < full
        and found["from_tier"] > 0
        and found["elastic"]
    )
    return {"right": right, **record}


def asked_of(length: int) -> list[dict[str, Any]]:
    """Return the prompts, which plain vLLM was asked too."""
    return prompts(12, length=length, max_tokens=7)[:COUNT]
