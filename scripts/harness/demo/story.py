"""The run of the demo, in order."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from harness import provenance
from harness.bench.measure import read
from harness.bench.memory import MappedMemory
from harness.bench.two_models import FIRST, SECOND, given
from harness.console import HarnessError, Row, Screen
from harness.demo import report
from harness.demo.conversations import (
    Answer,
    Conversation,
    at_once,
    conversations,
    hold,
    longest_request,
    warm_up,
)
from harness.demo.models import models
from harness.demo.options import Options
from harness.demo.servers import KVPATCH, MODELS, PLAIN, TIERED, Device, Way
from harness.demo.verdict import Comparison, Evidence, compare, failures, returning_ttft
from harness.serve import POLL_SECONDS, Server, workspace

NEEDED_MEMORY = 8 << 30
IDLE_SECONDS = 2.5  # shown in the picture; nothing waits for it
FALL_SECONDS = 15
MIB = 1 << 20
# Which model's conversations have their next turn, in order.
PHASES = {"first_peak": FIRST, "second_peak": SECOND, "first_returns": FIRST}


@dataclass
class Held:
    """The conversations, held one way.

    Attributes:
        answers: of both models.
        counted: the serving engine's own counters, by phase.
        used, kept: bytes that the first model has at its own peak, and at the second's.
        second_used: bytes that the second has at its peak.
        idle: bytes that both have at the end.
        cycle: what the picture is drawn from.
        memory: bytes of host memory of both servers.
        elastic: whether both reported their KV caches on elastic memory.
    """

    answers: list[Answer] = field(default_factory=list)
    counted: dict[str, dict[str, int]] = field(default_factory=dict)
    used: int = 0
    kept: int = 0
    second_used: int = 0
    idle: int = 0
    cycle: dict[str, Any] = field(default_factory=dict)
    memory: int = 0
    elastic: bool = False
    status_lines: list[str] = field(default_factory=list)

    @property
    def served(self) -> int:
        """Tokens of returning prompts that were not recomputed."""
        counted = self.counted["first_returns"]
        return counted["from_cache"] + counted["from_tier"]


class Story:
    """One run of the demo."""

    def __init__(self, options: Options, screen: Screen) -> None:
        self.options = options
        self.screen = screen
        self.plain = Held()
        self.tiered = Held()
        self.ours = Held()

    def run(self) -> int:
        """Run every way, compare, report; return the exit status."""
        _require_memory()
        versions = ", ".join(" ".join(one) for one in provenance.versions().items())
        self.screen.say(versions)
        self.machine = provenance.machine()  # before there is load
        self.models = models(self.options.generated, self.screen.say)
        self.load = self.models.loads.quick if self.options.quick else self.models.loads.full
        model = self.models.folders[FIRST]
        together = self.load.conversations
        self.device = Device.of(model, longest_request(model, self.load), together)
        self.screen.say(f"models: {self.models.words}")
        self.screen.say(
            f"device: {_mib(self.device.size)}, {self.device.pages} pages of "
            f"{_mib(self.device.page_bytes)}; a peak is {together} conversations at once"
        )
        with workspace() as folder:
            self._run(PLAIN, self.plain, folder)
            self._run(TIERED, self.tiered, folder)
            self._run(KVPATCH, self.ours, folder)
        comparison = compare(self.plain.answers, self.ours.answers)
        found = failures(
            Evidence(
                comparison=comparison,
                from_tier=self.ours.counted["first_returns"]["from_tier"],
                elastic=self.ours.elastic,
                half=self.device.half,
                first_peak=self.ours.used,
                second_peak=self.ours.second_used,
                kept=self.ours.kept,
                idle=self.ours.idle,
            )
        )
        rows = self._rows(comparison)
        path = report.write(
            report.Content(
                failures=found,
                rows=rows,
                environment=self._environment(versions),
                device=self.device,
                cycles={PLAIN.title: self.plain.cycle, KVPATCH.title: self.ours.cycle},
                returned={
                    "plain vLLM,\nstatic half": self.plain.counted["first_returns"],
                    "with its own\nCPU tier": self.tiered.counted["first_returns"],
                    "kvcached +\nkvpatch": self.ours.counted["first_returns"],
                },
                said=self._said(),
                status_lines=self.ours.status_lines,
            ),
            self.options.report,
        )
        self.screen.figures(rows)
        self.screen.say(f"report: {path}")
        self.screen.verdict(found)
        return 1 if found else 0

    def _run(self, way: Way, held: Held, folder: Path) -> None:
        """Start the servers of both models, and let their peaks take turns."""
        logs = self.options.keep_logs or folder
        folder = folder / way.kind(self.device, "").slug
        folder.mkdir()
        talks = conversations(self.models.folders[FIRST], self.load)
        with ExitStack() as stack:
            servers = {}
            for at, name in enumerate(MODELS):
                kind = way.kind(self.device, name)
                port = self.options.port and self.options.port + at
                model = self.models.folders[name]
                server = kind.server(model, folder, logs, port, wait=False)
                servers[name] = stack.enter_context(server)
            self._wait_for(way, servers)
            held.elastic = all(server.elastic for server in servers.values())
            held.status_lines = [line for one in servers.values() for line in one.status_lines]
            if way is KVPATCH:
                self._note_status(held)
            self.screen.live(f"{way.name}: warming up")
            at_once(_warm_up, list(servers.values()), [talks[name][0] for name in servers])
            with MappedMemory(str(folder), servers) as memory:
                for phase, name in PHASES.items():
                    with _failures_of(servers[name]):
                        self._phase(way, held, phase, servers[name], talks[name], memory)
                memory.phase("end")
                self._rest(way, held, memory)
            held.memory = sum(server.memory() for server in servers.values())
        static = 0 if way is KVPATCH else self.device.half
        first, second = memory.within("first_peak"), memory.within("second_peak")
        held.used, held.kept = given(first, second, held_for_good=static)
        held.second_used = static or max(sample[SECOND] for sample in second)
        held.cycle = {"used_bytes": held.used, "timeline": memory.timeline(points=400)}

    def _wait_for(self, way: Way, servers: dict[str, Server]) -> None:
        self.screen.say(f"{way.name}: starting both servers")
        starting = dict(servers)
        while starting:
            for name in [name for name, server in starting.items() if server.ready()]:
                seconds = starting.pop(name).start_seconds
                self.screen.say(f"{way.name}: the {name} model is ready after {seconds:.0f} s")
            self.screen.live(f"{way.name}: starting, {self.screen.seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def _note_status(self, held: Held) -> None:
        found = "yes" if held.elastic else "not reported"
        style = "" if held.elastic else "red"
        self.screen.say(f"{KVPATCH.name}: KV on elastic memory: {found}", style)

    def _phase(
        self,
        way: Way,
        held: Held,
        phase: str,
        server: Server,
        talks: list[Conversation],
        memory: MappedMemory,
    ) -> None:
        words = phase.replace("_", " ")
        self.screen.live(f"{way.name}: {words}, {len(talks)} conversations at once")
        before = read(server)
        memory.phase(phase)
        begun = time.monotonic()
        answers = hold(server.client, talks, self.load)
        seconds = time.monotonic() - begun
        after = read(server)
        held.counted[phase] = {name: int(after[name] - before[name]) for name in after}
        held.answers += answers
        line = (
            f"{way.name}: {words}, {len(answers)} answers in {seconds:.1f} s, "
            f"{sum(len(a.prompt) for a in answers)} prompt tokens, "
            f"{held.counted[phase]['from_tier']} of them from the CPU tier, "
            f"first token after {median(a.ttft for a in answers):.1f} s"
        )
        if way is not PLAIN:
            turn = answers[0].turn
            mine = {talk.number for talk in talks}
            right = [a for a in self.plain.answers if a.turn == turn and a.conversation in mine]
            same = compare(right, answers)
            line += f", {same.equal} of {same.total} tokens equal"
        if way is KVPATCH:
            most = max(memory.within(phase), key=lambda sample: sum(sample.values()))
            line += f", {_mib(most[FIRST])} and {_mib(most[SECOND])} mapped at most"
        self.screen.say(line)

    def _rest(self, way: Way, held: Held, memory: MappedMemory) -> None:
        """Let both engines idle: nothing is reset, what they do not use goes back by itself."""
        self.screen.live(f"{way.name}: idle")
        idle = len(MODELS) * self.device.idle
        deadline = time.monotonic() + FALL_SECONDS
        while sum(memory.look().values()) > idle and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        time.sleep(IDLE_SECONDS)
        held.idle = sum(memory.look().values())
        if way is KVPATCH:
            self.screen.say(f"{way.name}: both idle, {_mib(held.idle)} mapped")

    def _rows(self, comparison: Comparison) -> list[Row]:
        plain, tiered, ours, device = self.plain, self.tiered, self.ours, self.device
        returning = [answer for answer in ours.answers if answer.returning]
        prompts = sum(len(answer.prompt) for answer in returning)
        return [
            Row(
                "tokens equal to plain vLLM's",
                f"{comparison.equal:,} of {comparison.total:,}",
                f"{comparison.answers_equal} of {comparison.answers} answers; "
                f"log-probabilities within {comparison.logprob_difference:.1e}",
            ),
            Row(
                "of the device mapped by the first and by the second model at its peak",
                f"{_mib(ours.used, '')} and {_mib(ours.second_used)}",
                f"of {_mib(device.size)}; a static half is {_mib(device.half)}. In whole pages of "
                f"{_mib(device.page_bytes)}, none ahead of use",
            ),
            Row(
                "still mapped by the first model at the second's peak",
                _mib(ours.kept),
                f"an idle engine keeps {_mib(device.idle)}: the page of block 0, and the one that "
                "all unmapped addresses show",
            ),
            Row(
                "tokens of returning prompts not computed again",
                f"{ours.served:,} of {prompts:,}",
                f"{ours.counted['first_returns']['from_tier']:,} from the CPU tier; plain vLLM "
                f"with its own tier {tiered.served:,}, without {plain.served:,}: as many as the "
                "order in which they come and return leaves in its half",
            ),
            Row(
                "to the first token of a returning conversation",
                f"{returning_ttft(ours.answers):.1f} s, plain vLLM "
                f"{returning_ttft(plain.answers):.1f} s",
                f"with its own tier {returning_ttft(tiered.answers):.1f} s; "
                f"median of {len(returning)} that return at once, in the order they came"
                + ("" if self.models.real else "; models this small compute as fast as they load"),
            ),
            Row(
                "mapped by both models when both are idle",
                _mib(ours.idle),
                f"without a reset; static halves stay at {_mib(device.size)}, with a tier too",
            ),
            Row(
                "load",
                f"{len(MODELS)} x {self.load.conversations} conversations",
                f"each about {self.load.opening:,} tokens of a page of Python's manual; those of "
                "the first model return",
            ),
            Row("time without set-up", f"{self.screen.seconds:.0f} s"),
            Row(
                "host memory of two servers",
                f"{max(plain.memory, tiered.memory, ours.memory) / (1 << 30):.2f} GiB",
                "at the end of a way, the largest one; shared pages counted once",
            ),
        ]

    def _environment(self, versions: str) -> list[Row]:
        found = self.machine
        kind = KVPATCH.kind(self.device, FIRST)
        flags = " ".join(f"--{name} {value}" for name, value in kind.arguments.items())
        values = " ".join(f"{name}={value}" for name, value in kind.environment.items())
        return [
            Row("Command", self.options.command),
            Row("Versions", versions),
            Row("Models", self.models.words, "float32; Model Runner V1, one thread each"),
            Row("Engines with kvpatch", f"vllm serve MODEL --enforce-eager {flags}", values),
            Row("Python", found["python"]),
            Row(
                "Machine",
                f"{found['cpus']} CPUs, {found['memory_gib']} GiB, no GPU used",
                f"load of the minute before {found['load_before']:.1f}",
            ),
            Row("Device", _mib(self.device.size), "host memory standing in for GPU memory"),
        ]

    def _said(self) -> list[report.Said]:
        """Return what two conversations of each model said, where that is text."""
        if not self.models.real:
            return []
        talks = conversations(self.models.folders[FIRST], self.load)
        return report.said(self.ours.answers, [one for each in talks.values() for one in each[:2]])


def _warm_up(server: Server, conversation: Conversation) -> None:
    with _failures_of(server):
        warm_up(server.client, conversation)
        server.reset_caches()


@contextmanager
def _failures_of(server: Server) -> Iterator[None]:
    """Add the server and the end of its log to an error."""
    try:
        yield
    except (HarnessError, httpx.HTTPError) as error:
        raise server.failure(f"failed under load, {error}") from error


def _mib(size: int, unit: str = " MiB") -> str:
    return f"{size / MIB:.0f}{unit}"


def _require_memory() -> None:
    free = psutil.virtual_memory().available
    if free < NEEDED_MEMORY:
        raise HarnessError(
            f"only {free / (1 << 30):.1f} GiB of memory are free and the demo needs "
            f"{NEEDED_MEMORY >> 30}, because it runs two vLLM servers; stop other programs first"
        )
