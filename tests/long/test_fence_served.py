"""The fence in ``vllm serve``: what a finished or aborted request stored is what it computed.

The engine, its workers and the API server are processes of their own here, and the
engine steps by itself.
"""

import operator
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import requests

from harness.engines import plugins
from harness.engines.fences import BARE, PAGE
from harness.engines.runs import BLOCK, Run, block_bytes, prompts
from harness.engines.serving import watched
from harness.serve import Server
from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR
from kvpatch.hostdevice import ledger

COUNT = 3  # prompts of each scenario


def load_of(ranks: int) -> list[Any]:
    """Prompts of more than the page that block 0 keeps mapped."""
    return prompts(2 * COUNT, length=(PAGE * ranks + 9) * BLOCK - 32, seed=11)


def abort(server: Server, prompt: dict[str, Any]) -> None:
    """Let a request compute its first token, and leave."""
    body = {"prompt": prompt["tokens"], "max_tokens": 500, "ignore_eos": True, "stream": True}
    with requests.post(
        f"{server.url}/v1/completions", json=body, stream=True, timeout=120
    ) as answer:
        answer.raise_for_status()
        next(answer.iter_lines())


def wait_for(server: Server, metric: str, wanted: Callable[[float], bool]) -> None:
    """Ask seldom: an engine with held copies steps all the time and reports each step.

    The API server, behind with those reports on a busy machine, answers late.
    """
    deadline = time.monotonic() + 300
    while not wanted(value := server.metric(metric)):
        assert time.monotonic() < deadline, f"{metric} is {value}"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def served(device, tmp_path_factory):
    """The tokens of every prompt: of plain vLLM, or served from the tier."""
    found: dict[tuple[int, bool | None, bool], list[list[int]]] = {}

    def serve(ranks: int, fenced: bool | None, asynchronous: bool = False) -> list[list[int]]:
        """With the fence, without it, or (None) by plain vLLM."""
        key = (ranks, fenced, asynchronous)
        if key not in found:
            ours = fenced is not None
            run = Run(kvpatch=ours, offload=ours).within(BARE if ours else {})
            arguments = {
                "max_model_len": 4096,
                "max_num_batched_tokens": 3072 * ranks,
                "num_gpu_blocks_override": 400,
                "tensor_parallel_size": ranks,
            }
            plugged = [
                *[plugins.take_fence_out] * (fenced is False),
                *[plugins.schedule_asynchronously] * asynchronous,
            ]
            run = run.within({"VLLM_LOGGING_LEVEL": "DEBUG"})  # says how it schedules
            folder = tmp_path_factory.mktemp("serve")
            with watched(run, device, folder, *plugged, **arguments) as server:
                if ours:
                    store_all(server, ranks)
                found[key] = [server.complete(one)["tokens"] for one in load_of(ranks)]
                assert ("Batch queue is enabled" in server.log) is asynchronous
                if ours:
                    hits = server.metric("vllm:external_prefix_cache_hits_total")
                    assert hits == 2 * COUNT * (PAGE * ranks + 8) * BLOCK
        return found[key]

    return serve


def store_all(server: Server, ranks: int) -> None:
    """Finish half of the prompts and abort the others while their copies are held.

    One at a time: vLLM itself waits for the copy of a block that is handed out anew.
    """
    of_one = (PAGE * ranks + 8) * block_bytes(Run())
    with pytest.MonkeyPatch.context() as patch:
        for variable in (HOST_DEVICE.name, HOST_DEVICE_DIR.name):
            patch.setenv(variable, server.environment[variable])
        for number, prompt in enumerate(load_of(ranks), start=1):
            with ledger.hold_copies():
                if number <= COUNT:
                    server.complete(prompt | {"max_tokens": 1})
                else:
                    abort(server, prompt)
                wait_for(server, "vllm:num_requests_running", lambda running: running == 0)
            whole = number * of_one
            wait_for(server, "vllm:kvpatch_offload_bytes_total", partial(operator.eq, whole))


# Of two ranks the steps are those of one, and the unmapping is not.
@pytest.mark.parametrize(
    ("ranks", "asynchronous"),
    [(1, False), (1, True), (2, False)],
    ids=["1-sync", "1-async", "2-sync"],
)
def test_with_the_fence_the_tier_serves_what_was_computed(served, ranks, asynchronous):
    assert served(ranks, True, asynchronous) == served(ranks, None)


@pytest.mark.parametrize("ranks", [1, 2])
def test_without_the_fence_the_tier_serves_wrong_tokens(served, ranks):
    plain, bare = served(ranks, None), served(ranks, False)
    wrong = [one != other for one, other in zip(bare, plain, strict=True)]
    assert any(wrong[:COUNT]), "finished while its store was held"
    assert any(wrong[COUNT:]), "aborted while its store was held"
