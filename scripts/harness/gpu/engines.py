"""The steps that ask engines of ``vllm serve``, and compare what they answer with what they did."""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import kvpatch
from harness import connectors
from harness.console import HarnessError
from harness.engines import plugins
from harness.gpu import model
from harness.gpu.seen import RIGHT, Job, Seen, state
from harness.gpu.seen import arguments as options_of
from harness.serve import SPARE_PAGES, Server, workspace
from kvpatch import control
from kvpatch.environ import HOST_POOL
from kvpatch.verify import compare
from kvpatch.verify.api import Answer, Api
from kvpatch.verify.load import text

TOKENS = 8  # of an answer
# Prompts, and letters of each: of some GiB of KV cache on a GPU, and of 96 MiB elsewhere.
LOAD, ON_HOST = (12, 8000), (8, 1500)
ARGUMENTS: dict[str, Any] = {"gpu-memory-utilization": 0.4}  # of two at once
HOST_ARGUMENTS: dict[str, Any] = {
    "dtype": "float32",
    "max-model-len": 2048,
    "max-num-seqs": 4,
    "num-gpu-blocks-override": 300,
    "enforce-eager": True,
}
COMMAND_SECONDS = 60
NOTHING: Mapping[str, Any] = MappingProxyType({})
LOADED = "vllm:external_prefix_cache_hits_total"
MOVED = "vllm:kv_offload_{}_{}_total"


class Engine:
    """A server under a kvcached name, and what it answered first.

    Attributes:
        first: the answers to its prompts, computed.
        itself: how far it is from them when it is asked at once again.
    """

    def __init__(self, job: Job, server: Server, name: str) -> None:
        self.server, self.name = server, name
        count, self._letters = ON_HOST if job.host else LOAD
        self._names = [f"{name}, prompt {number}" for number in range(count)]
        self.api = Api(server.port)
        self.api.look()
        self.api.complete("warm-up", text("warm-up", self._letters), TOKENS)
        self.first = self.ask()
        self.itself = compare.differences(self.first, self.ask())

    @property
    def control(self) -> control.Engine:
        """The engine, as it is now."""
        return control.find(self.name)

    @property
    def mapped(self) -> int:
        """Bytes of the device that it has mapped."""
        return int(self.control.said["mapped"])

    def ask(self) -> list[Answer]:
        """Answer every prompt."""
        return [self.api.complete(one, text(one, self._letters), TOKENS) for one in self._names]

    def again(self, seen: Seen, when: str) -> list[Answer]:
        """Answer every prompt, and compare the answers with the first ones."""
        answers = self.ask()
        most = compare.allowed(self.itself)
        apart = compare.differences(self.first, answers)
        far = [one for one in apart if one.most > most]
        equal = sum(not one.at for one in apart)
        seen.note(**{f"equal answers {when}": f"{equal} of {len(apart)}"})
        seen.check(f"answers {when} are those from before", not far, "; ".join(map(str, far)))
        return answers

    def forget(self) -> None:
        """Empty the prefix cache on the device, once what it has is stored.

        Raises:
            HarnessError: it was refused for too long.
        """
        self.api.complete("a step", "a", 4)  # a store is launched in a later step
        time.sleep(1)
        if not eventually(self.api.reset):
            raise HarnessError(f"{self.name} did not empty its prefix cache")

    def loaded(self) -> int:
        """Tokens that came from the tier so far."""
        return int(self.server.metric(LOADED))


def eventually(holds: Callable[[], bool]) -> bool:
    """Return whether something holds within the time that a command may take."""
    deadline = time.monotonic() + COMMAND_SECONDS
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@contextmanager
def engine(
    job: Job,
    name: str,
    folder: Path,
    *,
    elastic: bool = True,
    tier: bool = True,
    arguments: Mapping[str, Any] = NOTHING,
    environment: Mapping[str, str] = NOTHING,
) -> Iterator[Engine]:
    """Start a server, and ask it its prompts.

    Args:
        name: of the engine in messages; unique in the step.
        folder: of its host device.
        elastic: with kvpatch, on kvcached's memory.
    """
    ours = f"gpu-{os.getpid()}-{name}"
    given = dict(HOST_ARGUMENTS if job.host else ARGUMENTS)
    if tier:
        # vLLM's own spec copies by CUDA.
        given["kv-transfer-config"] = connectors.offloading(
            int(job.tier_gib * (1 << 30)), job.host and not elastic
        )
    variables = job.environment(
        folder,
        KVPATCH=str(int(elastic)),
        KVCACHED_IPC_NAME=ours,
        KVCACHED_MAX_CACHED_TOKENS="-1",  # what it keeps is the limit's to say
        **SPARE_PAGES,  # what it has mapped is then what it uses
        **environment,
    )
    server = Server(
        Path(model.wide(job)),
        given | {**arguments} | options_of(job.options),
        variables,
        folder,
        name=name,
        log=job.logs() / f"{job.step}-{name}.log",
    )
    os.environ["KVPATCH_STATUS_DIR"] = variables["KVPATCH_STATUS_DIR"]
    with server:
        print(f"{name} answers after {server.start_seconds:.0f} s", flush=True)
        yield Engine(job, server, ours)


def plain(job: Job, seen: Seen) -> None:
    """Ask plain vLLM twice."""
    with workspace() as folder, engine(job, "plain", folder, elastic=False, tier=False) as one:
        seen.note(seconds_to_start=round(one.server.start_seconds or 0, 1))
        one.again(seen, "from its own prefix cache")


def verbs(job: Job, seen: Seen) -> None:
    """Limit, suspend and resume an engine, and ask it after each."""
    with workspace() as folder, engine(job, "engine", folder) as one:
        seen.check("its KV cache is on elastic memory", one.server.elastic)
        most, held = int(one.control.said["most"]), one.mapped
        half = one.control.limit(held // 2).limit
        seen.check(
            "half of its memory is given back",
            eventually(lambda: one.mapped <= half),
            f"{one.mapped} of {held} bytes are mapped under a limit of {half}",
        )
        before = one.loaded()
        one.again(seen, "under half of the memory")
        seen.check("prompts that were evicted come from the tier", one.loaded() > before)
        one.control.limit(most)
        suspended(seen, one)
        resumed(seen, one)
        fence = next((each.engine["fence"] for each in kvpatch.status() if each.engine), None)
        seen.note(fence=fence)
        seen.check("pages went through the fence", bool(fence and fence["released"]))


def suspended(seen: Seen, one: Engine) -> None:
    """Suspend an engine, and see its memory free."""
    answer = one.control.suspend(timeout=COMMAND_SECONDS)
    seen.note(suspended=answer.said)
    seen.check("it is suspended", answer.phase == "suspended", answer.sentence)
    seen.check("nothing is lost by that", answer.lost == 0, answer.sentence)
    seen.check("its memory is free", answer.freed > 0 and answer.mapped <= answer.limit)


def resumed(seen: Seen, one: Engine) -> None:
    """Resume an engine, and ask it again."""
    before = one.loaded()
    answer = one.control.resume()
    seen.check("it is resumed", answer.phase == "runs", answer.sentence)
    one.again(seen, "after a suspension")
    seen.check("what was stored comes back from the tier", one.loaded() > before)


def two(job: Job, seen: Seen) -> None:
    """Let an engine use what another one gave, and take it back."""
    with (
        workspace() as folder,
        engine(job, "lender", folder) as lender,
        engine(job, "borrower", folder) as borrower,
    ):
        held = borrower.mapped
        half = borrower.control.limit(held // 2).limit
        eventually(lambda: borrower.mapped <= half)
        lender.control.limit(lender.mapped)
        suspended(seen, lender)
        borrower.control.limit(held)
        borrower.again(seen, "in lent memory")
        seen.note(borrowed=borrower.mapped - half)
        seen.check("it maps more than its own half", borrower.mapped > half)
        borrower.control.limit(half)
        seen.check("it gives that back", eventually(lambda: borrower.mapped <= half))
        resumed(seen, lender)


def first(job: Job, seen: Seen) -> None:
    """Measure first tokens of prompts that return: computed, and from a tier of each memory."""
    arms = {"computed": (False, False), "static tier": (False, True), "elastic tier": (True, True)}
    for arm, (elastic, tier) in arms.items():
        with (
            workspace() as folder,
            engine(job, arm.replace(" ", "-"), folder, elastic=elastic, tier=tier) as one,
        ):
            before = one.loaded()
            one.forget()
            answers = one.again(seen, f"of {arm}")
            loaded = one.loaded() - before
            seen.check(f"{arm}: tokens from the tier", bool(loaded) is tier, str(loaded))
            seen.note(**{arm: {"first": times(one.first), "returning": times(answers)}})
            if elastic:
                seen.note(moved=list(moved(one.server, loaded)))


def times(answers: list[Answer]) -> dict[str, float]:
    """Return milliseconds to the first token: the median, and the most."""
    each = [answer.first * 1e3 for answer in answers]
    return {"p50_ms": round(median(each), 2), "max_ms": round(max(each), 2)}


def moved(server: Server, tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the rates of an engine's copies, and the bytes of one of its blocks.

    Args:
        tokens: that it loaded.
    """
    (block,) = (
        int(sample.labels["block_size"])
        for sample in server.metrics().samples
        if sample.name == "vllm:cache_config_info"
    )
    loaded = server.metric(MOVED.format("load", "bytes"))
    for way in ("store", "load"):
        size, seconds = (server.metric(MOVED.format(way, of)) for of in ("bytes", "time"))
        if size and seconds and tokens:
            yield {
                "connector": "OffloadingConnector",
                "direction": way,
                "gb_per_second": round(size / seconds / 1e9, 3),
                "block_bytes": round(loaded * block / tokens),
            }


def pool(job: Job, seen: Seen) -> None:
    """Ask an engine whose tier is in a host pool, which is refused on a GPU (KVP344).

    The refusal is lifted where the probe saw what it is about: memory that was deregistered and
    punched is free, and what is copied into an extent is there.
    """
    probe = Path(job.output, "probe.json")
    name = f"gpu{os.getpid()}"
    more = {HOST_POOL.name: f"{int(job.tier_gib * (1 << 30))}@{name}"}
    with workspace() as folder:
        if not job.host:
            if not probe.exists() or state(json.loads(probe.read_text())) != RIGHT:
                seen.miss("the probe did not answer what KVP344 asks; it is not lifted")
                return
            lifted = plugins.install(folder / "plugin", plugins.lift_host_pool.__name__)
            more["PYTHONPATH"] = os.pathsep.join((lifted, os.environ["PYTHONPATH"]))
            seen.note(lifted=["KVP344"])
        with engine(job, "pooled", folder, environment=more) as one:
            before = one.loaded()
            one.forget()
            one.again(seen, "from the host pool")
            seen.check("prompts come from the pool", one.loaded() > before)


def sleep(job: Job, seen: Seen) -> None:
    """Let an engine sleep, and ask it again."""
    # With a tier it is refused on a GPU (KVP341).
    asleep = {"enable-sleep-mode": True}
    with workspace() as folder, engine(job, "one", folder, tier=job.host, arguments=asleep) as one:
        client = one.server.client
        client.post("/sleep", params={"level": 1}).raise_for_status()
        seen.check("it sleeps", client.get("/is_sleeping").json()["is_sleeping"])
        client.post("/wake_up").raise_for_status()
        one.again(seen, "after sleep")
