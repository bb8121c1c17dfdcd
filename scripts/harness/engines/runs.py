"""What engine runs are: engines, devices, prompts, and how a run ended."""

import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.version import Version

from harness import (
    connectors,
    environments,
    experts,
    hearing,
    model_cache,
    parallel_drafts,
    processes,
)
from harness.engines import process, reverted
from harness.models import SCALES

BLOCK = 32
ALL = 12  # prompts of the load "all", which fill the device almost twice
# With Triton there, vLLM takes Model Runner V2 by itself, as it does on a GPU.
RUNNER = {"v1": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "v2": {"TRITON_INTERPRET": "1"}}
FORCED = {"VLLM_USE_V2_MODEL_RUNNER": "1"}

ENDING = 120.0  # seconds in which a driver that has no more to do has ended
LIMIT = 300  # seconds after which a run is taken for one that hangs
FIRST_FS = dict.fromkeys(("0.22.0", "0.22.1"), "fs_python")  # what the tier fs was called at first
EXAMPLE = "example"  # in the place of a folder: vLLM's example of a tier


# How drafts are made. Of n-grams down to one token, one is always found again and is wrong, as the
# model repeats nothing; the draft model has the model's weights with some noise, and is right at
# times; an EAGLE head drafts the token before once more, and is right as rarely as n-grams are, and
# as the layer of random weights behind the model of experts (mtp).
SPECULATIONS: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    },
    "draft model": {"method": "draft_model", "model": "draft", "num_speculative_tokens": 3},
    "EAGLE": {"method": "eagle", "model": "eagle", "num_speculative_tokens": 3},
    "EAGLE-3": {"method": "eagle3", "model": "eagle3", "num_speculative_tokens": 3},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
    **{
        kind: {"method": kind, "model": kind, "num_speculative_tokens": 3}
        for kind in parallel_drafts.KINDS
    },
}
# Those that read states of the model, for which vLLM computes the last block again.
READ_STATES = ("EAGLE", "EAGLE-3", "mtp")
# Layers of what drafts, which are in the blocks of the model's.
DRAFTING = {
    **{"draft model": 4, "EAGLE": 1, "EAGLE-3": 1, "mtp": 1},
    **dict.fromkeys(parallel_drafts.KINDS, parallel_drafts.LAYERS),
}
# The modules that make other models than ``harness.models``.
MAKERS = {
    **dict.fromkeys(experts.KINDS, experts.__name__),
    **dict.fromkeys(parallel_drafts.KINDS, parallel_drafts.__name__),
    hearing.KIND: hearing.__name__,
}


@dataclass(frozen=True)
class Run:
    """One engine run, hashable so that tests that need the same one share it."""

    model: str = "llama"
    experts: bool = False  # in its layers; a model of latent attention and a hybrid can have them
    delta: bool = False  # a hybrid's states are those of gated delta nets
    kv_heads: int = 4
    vllm: str = ""  # a release with an environment of its own; empty: the one in .venv
    runner: str = "v1"
    kvpatch: bool = True
    offload: bool = True
    contiguous: bool = True
    cpu_blocks: int = 0  # 0: room for every load, see ``ROOM``
    policy: str = "lru"
    revert: tuple[str, ...] = ()
    forced: tuple[str, ...] = ()  # codes of the refusals that it starts in spite of
    cross_layer: bool = False
    dtype: str = "float32"
    asynchronous: bool = False  # scheduling, which is a GPU's default
    together: int = 4
    rounds: tuple[str, ...] = ("all", "all")  # names of loads, see ``load``
    blocks: int = 140  # of the device, of which one prompt of the load takes 20
    simple: str = ""  # eager or lazy, with SimpleCPUOffloadConnector
    batch: int = 2048  # tokens of a step
    windows: bool = False  # asked for blocks that leave a sliding window; 0.22 has it by default
    exhaust: int = 0  # every so many times the device has no blocks left for a group
    events: bool = False
    environment: tuple[tuple[str, str], ...] = ()
    tiers: tuple[str, ...] = ()  # behind the CPU tier: folders, URLs of buckets, or EXAMPLE
    inside: tuple[str, ...] = ()  # connectors of a MultiConnector, in order
    cache_dtype: str = ""  # of the KV cache, where it is not the model's
    ranks: int = 1  # of tensor parallelism, each in a process of its own
    stages: int = 1  # of pipeline parallelism, the same
    engines: int = 1  # of one server: data parallel ranks
    speculation: str = ""  # one of ``SPECULATIONS``
    settings: tuple[tuple[str, Any], ...] = ()  # more arguments of ``LLM``
    extra: tuple[tuple[str, Any], ...] = ()  # more of OffloadingConnector's extra config

    @property
    def groups_windows(self) -> bool:
        """Whether layers with windows are in a group of their own, which shares blocks."""
        return self.model == "sliding" and not self.has("disable_hybrid_kv_cache_manager", True)

    @property
    def workers(self) -> int:
        """How many processes compute, besides the engine's own if there are several."""
        return self.ranks * self.stages

    def has(self, name: str, value: Any) -> bool:
        """Whether ``settings`` has an argument with a value."""
        return (name, value) in self.settings

    def within(self, variables: Mapping[str, str]) -> "Run":
        """Return it with more variables in its environment."""
        return replace(self, environment=(*self.environment, *variables.items()))


@dataclass
class Device:
    """A host device of its own, so that tests do not see other engines' memory."""

    folder: Path
    size: str = "1GiB"
    environment: dict[str, str] = field(default_factory=dict)

    def environ(self, run: Run) -> dict[str, str]:
        """The environment of an engine of ``run`` on this device."""
        environment = processes.on_host_device(
            self.folder,
            self.size,
            KVPATCH="1" if run.kvpatch else "0",
            KVCACHED_CONTIGUOUS_LAYOUT=str(run.contiguous).lower(),
            # What vLLM knows of models: 15 s, and each release overwrites the others'.
            VLLM_CACHE_ROOT=str(cache_of(run.vllm)),
            # Eager engines compile nothing but the ranks of log-probabilities: 3 s.
            TORCHDYNAMO_DISABLE="1",
            **processes.one_thread(run.vllm, run.workers),
            # From 0.33 on vLLM wants a memory node of its own for each engine of a server, unless
            # this is set; of "0" nothing else takes notice.
            **({"VLLM_CPU_SIM_MULTI_NUMA": "0"} if run.engines > 1 else {}),
            **RUNNER[run.runner],
            # By itself vLLM 0.28 takes Runner V1 for hybrid models.
            **(FORCED if (run.runner, run.model) == ("v2", "hybrid") else {}),
            # A release outside the range is compared before the range is widened.
            **({"KVPATCH_ALLOW_VLLM": run.vllm} if run.vllm else {}),
        )
        return environment | self.environment | dict(run.environment)


@lru_cache
def python_of(vllm: str) -> str:
    """The Python of an environment with a release of vLLM, which is made if need be."""
    here = not vllm or vllm == metadata.version("vllm-cpu")
    return sys.executable if here else str(environments.made(vllm))


def cache_of(vllm: str) -> Path:
    """What the engines of a release keep from run to run, beside its environment."""
    return Path(python_of(vllm)).parents[1] / "vllm-cache"


# Earlier releases have a transformers that does not read what a later one wrote.
TRANSFORMERS_5 = Version("0.19.1")


def model_of(kind: str, kv_heads: int = 4, vllm: str = "") -> Path:
    """The folder of a small model of a kind and a number of KV heads, made once."""
    by = vllm if vllm and Version(vllm) < TRANSFORMERS_5 else ""
    module = MAKERS.get(kind, model_cache.MODELS)
    path = cache_of(by) / f"models-{model_cache.recipe(module)}" / f"{kind}-{kv_heads}"
    if not path.exists():
        options = ("--kind", kind, "--kv-heads", str(kv_heads))
        model_cache.make(path, *options, python=python_of(by), module=module)
    return path


def weights_name(run: Run) -> str:
    """The kind of the model of a run, as it is made."""
    kind = experts.DELTA if run.delta else run.model
    drafted = f"{kind} {run.speculation}"
    if drafted in experts.DRAFTED:
        return drafted
    return f"{kind} {experts.KIND}" if run.experts and not run.delta else kind


def weights_of(run: Run) -> Path:
    """The folder of the model of a run."""
    return model_of(weights_name(run), run.kv_heads, run.vllm)


# Tokens of one block where it is not BLOCK: vLLM's CPU backend has latent attention in one
# size only, and makes a block of attention as large as a state.
LATENTS = ("latent", experts.INDEXED)
TOKENS = {**dict.fromkeys(LATENTS, 16), "hybrid": 128}


# Blocks of ``BLOCK`` tokens that a load fills, in all groups of KV cache.
ROOM = {
    "llama": 640,
    experts.KIND: 640,
    "sliding": 1280,
    **dict.fromkeys(LATENTS, 640),
    "hybrid": 1280,
    "seeing": 640,
    hearing.KIND: 640,
    "two sizes": 1280,
    "scaled": 640,
    "scaled otherwise": 640,
}


def block_tokens(run: Run) -> int:
    """Tokens of one block of a run; of bytes four times as many, which are as long.

    A hybrid's block is as large as a state: of bytes it has as many tokens of twice the heads, or,
    over ranks, twice the tokens. Of latent attention a CPU has one size.
    """
    if run.model == "hybrid" and run.cache_dtype and run.ranks > 1:
        return 2 * TOKENS[run.model]
    fp8 = (run.cache_dtype or run.model in SCALES) and run.model not in TOKENS
    return TOKENS.get(run.model, BLOCK) * (4 if fp8 else 1)


def block_bytes(run: Run) -> int:
    """Bytes of one block of a run, all layers, also of what drafts.

    K and V of heads of 64 float32, or of four times the tokens in fp8; what all heads share, 512
    and 64, in fp8 with scales and bfloat16, and what an indexer keeps, 128 bytes and a scale; or,
    in bfloat16, K and V of heads of 32.
    """
    model, kv_heads, drafting = run.model, run.kv_heads, DRAFTING.get(run.speculation, 0)
    if model in LATENTS:
        latents = 512 + 4 * 4 + 2 * 64 if run.cache_dtype else 4 * (512 + 64)
        indexed = 128 + 4 if model == experts.INDEXED else 0
        return (4 + drafting) * TOKENS[model] * (latents + indexed)
    if model == "hybrid":
        values = (2 + drafting) * block_tokens(run) * kv_heads * 32 * 2
        return values * (1 if run.cache_dtype else 2)
    pools = (2 if run.groups_windows else 4) + drafting
    return pools * BLOCK * kv_heads * 64 * 2 * 4


def copies_of(run: Run) -> int:
    """How often a CPU tier has the bytes of a block.

    Heads are divided among ranks, and what all heads share is not: OffloadingConnector has one
    copy of it for all ranks, from 0.27 on, and SimpleCPUOffloadConnector one for each.
    """
    return run.ranks if run.model in LATENTS and run.simple else 1


def restored_tokens(run: Run, cached: int) -> int:
    """Tokens of a prompt that come from a tier that has ``cached`` of them, at least.

    What fills no chunk is in no tier.
    """
    restored = cached - block_tokens(run) if run.speculation in READ_STATES else cached
    return restored // (chunk := chunk_tokens(run)) * chunk


def chunk_tokens(run: Run) -> int:
    """Tokens of what a tier of a run stores under one name."""
    return int(dict(run.extra).get("block_size", block_tokens(run)))


def speculation(run: Run) -> dict[str, Any]:
    """The ``speculative_config`` of ``run``."""
    chosen = dict(SPECULATIONS[run.speculation])
    if "model" in chosen:
        chosen["model"] = str(model_of(chosen["model"], run.kv_heads, run.vllm))
    return chosen


def tier_bytes(run: Run) -> int:
    """Bytes of the CPU tier of ``run``, which counts blocks of ``BLOCK`` tokens."""
    blocks = (run.cpu_blocks or ROOM[run.model]) * BLOCK // block_tokens(run)
    return blocks * block_bytes(run) * copies_of(run)


def tier_of(place: str, vllm: str) -> dict[str, Any]:
    """The configuration of a secondary tier: a folder, a bucket's URL, or ``EXAMPLE``."""
    if place == EXAMPLE:
        return {"type": "example"}
    if not place.startswith("http://"):
        return {"type": FIRST_FS.get(vllm, "fs"), "root_dir": place}
    endpoint, _, bucket = place.rpartition("/")
    keys = {"access_key": "anybody", "secret_key": "anything", "region": "us-east-1"}
    return {
        "type": "obj",
        "store_config": {"bucket": bucket, "endpoint_override": endpoint, **keys},
    }


def connector(run: Run) -> dict[str, Any]:
    """The ``kv_transfer_config`` of ``run``."""
    size = tier_bytes(run)
    simple = connectors.simple(size, lazy=run.simple == "lazy")
    if run.simple and not run.inside:
        return simple
    extra = {"eviction_policy": run.policy, **dict(run.extra)}
    if run.tiers:
        tiers = [tier_of(place, run.vllm) for place in run.tiers]
        offloading = connectors.tiering(size, tiers, not run.kvpatch, **extra)
    else:
        offloading = connectors.offloading(size, not run.kvpatch, **extra)
    if not run.inside:
        return offloading
    each = (offloading, simple, connectors.connector("NothingConnector"))
    known = {one["kv_connector"]: one for one in each}
    return connectors.multi(*(known[name] for name in run.inside))


def engine_arguments(run: Run) -> dict[str, Any]:
    """``LLM`` arguments."""
    arguments: dict[str, Any] = {
        "dtype": run.dtype,
        "max_model_len": 1024 if _is_short(run) else 2048,
        "block_size": block_tokens(run),
        "enforce_eager": True,
        "num_gpu_blocks_override": run.blocks * BLOCK // block_tokens(run),
        "max_num_seqs": run.together,
        "max_num_batched_tokens": run.batch,
        "seed": 0,
        **({"async_scheduling": True} if run.asynchronous else {}),
    }
    if run.model in LATENTS:
        # vLLM's kernel for them on a CPU leaves the first token of a step as it is.
        arguments["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
        # On a processor with AMX vLLM would take AMX_MLA, which knows no float32.
        arguments["attention_backend"] = "CPU_MLA"
    if run.model == experts.INDEXED:
        arguments["hf_overrides"] = {"index_topk": experts.CHOSEN}
    if run.model == "hybrid":
        # As later releases do unasked. Up to 0.28 vLLM leaves it off for models with Mamba layers,
        # and if it is on takes the mode "all", in which it ends on a CPU.
        arguments["enable_prefix_caching"] = True
        arguments["mamba_cache_mode"] = "align"
    if run.speculation:
        arguments["speculative_config"] = speculation(run)
    arguments |= dict(run.settings)
    if run.ranks > 1:
        arguments["tensor_parallel_size"] = run.ranks
    if run.stages > 1:
        arguments["pipeline_parallel_size"] = run.stages
    if run.engines > 1:
        arguments["data_parallel_size"] = run.engines
    if run.cache_dtype:
        arguments["kv_cache_dtype"] = run.cache_dtype
    if run.windows:
        arguments["disable_hybrid_kv_cache_manager"] = False
    if run.events:
        # Four of kvcached's pages: it rounds down to whole ones, and vLLM does not.
        arguments["num_gpu_blocks_override"] = 128 * BLOCK // block_tokens(run)
    if ("VLLM_USE_SIMPLE_KV_OFFLOAD", "1") in run.environment:
        arguments["kv_offloading_size"] = tier_bytes(run) / (1 << 30)
    elif run.offload:
        arguments["kv_transfer_config"] = connector(run)
    return arguments


def _is_short(run: Run) -> bool:
    """Return whether requests are short.

    Only whole pages count, and a request of windows needs blocks in both groups. The length is in
    the name of a tier's folder, which engines of any size share.
    """
    return run.model in ("sliding", "two sizes") or run.blocks < 128 or bool(run.tiers)


def prompts(count: int, length: int = 640, max_tokens: int = 8, seed: int = 3) -> list[Any]:
    """Random prompts that share no block."""
    source = random.Random(seed)
    return [
        {"tokens": [source.randrange(2, 258) for _ in range(length + 9)], "max_tokens": max_tokens}
        for _ in range(count)
    ]


def related(source: random.Random, count: int, shortest: int, longest: int) -> list[list[int]]:
    """Prompts of ``shortest`` to ``longest`` tokens; a third share a prefix with another."""
    made: list[list[int]] = []
    for index in range(count):
        length = source.randrange(shortest, longest)
        head = source.choice(made)[: length // 2] if index % 3 == 2 else []
        made.append(head + [source.randrange(2, 258) for _ in range(length - len(head))])
    return made


def load(name: str) -> list[Any]:
    """The prompts of a round: what they have in common with other rounds, and how long."""
    if name == "few":
        return prompts(8)  # the first of "all"
    if name == "scored":  # the same, and every token of them is computed
        return [prompt | {"prompt_logprobs": 0} for prompt in prompts(4)]
    if name == "short":
        return prompts(8, max_tokens=7)  # no block of 16 tokens is filled by what is generated
    if name == "long":
        return prompts(8, max_tokens=80)  # what is generated needs more blocks
    if name == "exact":
        return prompts(4, length=640 - 9, seed=5)  # nothing behind the last whole block
    if name == "shared":
        common = prompts(1, length=320 - 9, seed=6)[0]["tokens"]
        return [
            prompt | {"tokens": common + prompt["tokens"]}
            for prompt in prompts(4, length=320, seed=7)
        ]
    if name == "back":
        return prompts(24)[::-1]  # who was here last comes back first
    if name == "whole":
        return whole_blocks()
    return prompts(int(name) if name.isdigit() else ALL)


def whole_blocks() -> list[Any]:
    """Prompts that end with a block, the second like the first to its middle.

    Without a block that is only partly full, kvcached and vLLM evict the same blocks.
    """
    load = prompts(12, length=20 * BLOCK - 9, max_tokens=1)
    load[1]["tokens"][: 10 * BLOCK] = load[0]["tokens"][: 10 * BLOCK]
    return load


@dataclass
class Finished:
    """How a run ended."""

    code: int
    log: str
    result: dict[str, Any]

    @property
    def end(self) -> str:
        """What a failed engine said last; all threads' stacks, where it hung or crashed."""
        log = self.log.partition("nanobind: leaked")[0]
        stacks = re.search(r"^(Fatal Python error|Timeout \()", log, re.MULTILINE)
        return log[max(0, stacks.start() - 1000) :] if stacks else log[-4000:]

    def round(self, index: int) -> list[Any]:
        """The records of one round; the log is shown when the engine failed."""
        assert self.code == 0, self.end
        return list(self.result["rounds"][index])


def run_driver(
    job: dict[str, Any],
    environment: dict[str, str],
    folder: Path,
    timeout: float = LIMIT,
    vllm: str = "",
    driver: str = "driver",
    result: Path | None = None,
) -> Finished:
    """Run a driver on ``job`` in a process of its own, with a release of vLLM.

    Its log is in ``folder``, and so is its result where no other file is named.

    Raises:
        subprocess.TimeoutExpired: it was killed; the end of its log is in ``output``.
        reverted.NotInForce: a row that the job takes out was not there.
    """
    job_path, log = folder / "job.json", folder / "log"
    result_path = result or folder / "result.json"
    result_path.unlink(missing_ok=True)
    job_path.write_text(json.dumps(job))
    with log.open("w") as output:
        engine = process.start(
            f"harness.engines.{driver}",
            [job_path, result_path],
            environment,
            python_of(vllm),
            output,
        )
    try:
        code = engine.wait(timeout)
    except subprocess.TimeoutExpired as late:
        engine.kill()
        engine.wait()
        late.output = log.read_text(errors="replace")[-4000:]
        raise
    said = log.read_text(errors="replace")
    reverted.check(code, said)
    written = result_path.exists() and result_path.suffix == ".json"
    found = json.loads(result_path.read_text()) if written else {}
    return Finished(code, said, found)


class Driver:
    """A running driver that says how far it is, and waits for a line that lets it go on.

    Args:
        job: that it is given.
        environment: the whole of it.
        folder: of its own, made here.
        driver: its module.
        vllm: its release, as of ``run_driver``.
    """

    def __init__(
        self,
        job: dict[str, Any],
        environment: dict[str, str],
        folder: Path,
        driver: str = "driver",
        vllm: str = "",
    ) -> None:
        folder.mkdir()
        job_path, self._result = folder / "job.json", folder / "result.json"
        job_path.write_text(json.dumps(job))
        reading, output = os.pipe()
        stdin, self._input = os.pipe()
        self._process = process.start(
            f"harness.engines.{driver}",
            [job_path, self._result],
            environment,
            python_of(vllm),
            output,
            stdin,
        )
        os.close(output)
        os.close(stdin)
        self.pid = self._process.pid
        self._output = os.fdopen(reading, errors="replace")
        self._log: list[str] = []

    def hear(self, word: str) -> None:
        """Wait until it says a word.

        Raises:
            AssertionError: it ended before; the end of its log.
        """
        for line in self._output:
            self._log.append(line)
            if line == f"driver: {word}\n":
                return
        raise AssertionError(f"ended before {word!r}\n" + "".join(self._log)[-4000:])

    def say(self, line: str = "") -> None:
        """Let it go on, with a line that it reads."""
        os.write(self._input, f"{line}\n".encode())

    def result(self) -> dict[str, Any]:
        """What it wrote last."""
        found: dict[str, Any] = json.loads(self._result.read_text())
        return found

    def end(self) -> dict[str, Any]:
        """Let it come to its end; return what it wrote last.

        Raises:
            AssertionError: it failed; the end of its log.
        """
        os.close(self._input)
        self._log += self._output.readlines()
        assert self._process.wait(ENDING) == 0, "".join(self._log)[-4000:]
        self._output.close()
        return self.result()

    @property
    def runs(self) -> bool:
        """Whether it was neither ended nor killed."""
        return not self._output.closed

    def kill(self) -> None:
        """End it as ``kill -9`` does, unless it has ended; wait for all that it had started."""
        if not self.runs:
            return
        self._process.kill()
        self._process.wait(ENDING)
        self._output.read()  # its workers have it too
        self._output.close()
        os.close(self._input)
