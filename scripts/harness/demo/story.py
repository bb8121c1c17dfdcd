"""The run of the demo, in order."""

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
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
    longest_request,
)
from harness.demo.models import QUICK, Load, models
from harness.demo.servers import KVPATCH, MODELS, PLAIN, TIERED, Device, Way
from harness.demo.verdict import Comparison, Held, compare, failures
from harness.serve import POLL_SECONDS, Server, workspace

NEEDED_MEMORY = 8 << 30
APART_SECONDS = 0.02  # of requests that arrive at once
IDLE_SECONDS = 2.5  # shown in the picture; nothing waits for it
FALL_SECONDS = 15
# Which model's conversations have their next turn, in order.
PHASES = {"first_peak": FIRST, "second_peak": SECOND, "first_returns": FIRST}


class Story:
    """One run of the demo."""

    def __init__(self, options: argparse.Namespace, command: str, screen: Screen) -> None:
        self.options = options
        self.command = command
        self.screen = screen
        self.held: dict[Way, Held] = {}

    def run(self) -> int:
        """Run every way, compare, report; return the exit status."""
        _require_memory()
        versions = ", ".join(" ".join(one) for one in provenance.versions().items())
        self.screen.say(versions)
        machine = provenance.machine()  # before there is load
        self.models = models(self.options.generated, self.screen.say)
        self.load = self.models.load
        if self.options.quick:
            self.load = replace(self.load, conversations=QUICK)
        model, together = self.models.folders[FIRST], self.load.conversations
        self.device = device = Device.of(model, longest_request(model, self.load), together)
        self.screen.say(f"models: {self.models.words}")
        self.screen.say(
            f"device: {_mib(device.size)}, {device.pages} pages of {_mib(device.page_bytes)}; "
            f"a peak is {together} conversations at once"
        )
        with workspace() as folder:
            for way in (PLAIN, TIERED, KVPATCH):
                self._hold(way, folder)
        comparison = compare(self.held[PLAIN].answers, self.held[KVPATCH].answers)
        found = failures(comparison, self.held[KVPATCH], device.half)
        figures = self._figures(comparison)
        path = report.write(
            self.options.report,
            device,
            self.held,
            failures=found,
            figures=figures,
            environment=self._environment(versions, machine),
            said=self._said(),
        )
        self.screen.figures(figures)
        self.screen.say(f"report: {path}")
        self.screen.verdict(found)
        return 1 if found else 0

    def _hold(self, way: Way, folder: Path) -> None:
        """Start the servers of both models, and let their peaks take turns."""
        held = self.held[way] = Held()
        logs = self.options.keep_logs or folder
        folder = folder / way.slug
        folder.mkdir()
        talks = conversations(self.models.folders[FIRST], self.load)
        with ExitStack() as stack:
            servers = {}
            for name in MODELS:
                kind = way.kind(self.device, name)
                server = kind.server(self.models.folders[name], folder, logs, wait=False)
                servers[name] = stack.enter_context(server)
            self._wait_for(way, servers)
            held.elastic = all(server.elastic for server in servers.values())
            held.status_lines = [line for one in servers.values() for line in one.status_lines]
            self.screen.live(f"{way.name}: warming up")
            opening = [talks[name][0] for name in servers]
            at_once(_warm_up, list(servers.values()), opening, [self.load] * len(opening))
            with MappedMemory(str(folder), servers) as memory:
                for phase, name in PHASES.items():
                    with _failures_of(servers[name]):
                        self._phase(way, phase, servers[name], talks[name], memory)
                memory.phase("end")
                self._rest(way, memory)
        static = 0 if way.elastic else self.device.half
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

    def _phase(
        self, way: Way, phase: str, server: Server, talks: list[Conversation], memory: MappedMemory
    ) -> None:
        """Hold the next turn of conversations, all at once.

        They arrive in the same order in every turn: what a full KV cache still has depends on it.
        """

        def one(at: int, talk: Conversation) -> Answer:
            time.sleep(at * APART_SECONDS)
            return talk.ask(server.client, self.load)

        held, words = self.held[way], phase.replace("_", " ")
        self.screen.live(f"{way.name}: {words}, {len(talks)} conversations at once")
        before = _counters(server)
        memory.phase(phase)
        begun = time.monotonic()
        answers = at_once(one, range(len(talks)), talks)
        seconds = time.monotonic() - begun
        after = _counters(server)
        counted = held.counted[phase] = {name: after[name] - before[name] for name in after}
        counted["ttft"] /= len(answers)
        held.answers += answers
        asked = {(answer.conversation, answer.turn) for answer in answers}
        plain = [a for a in self.held[PLAIN].answers if (a.conversation, a.turn) in asked]
        same = compare(plain, answers)
        most = max(memory.within(phase), key=lambda sample: sum(sample.values()))
        self.screen.say(
            f"{way.name}: {words}, {len(answers)} answers in {seconds:.1f} s, "
            f"{sum(len(a.prompt) for a in answers)} prompt tokens, "
            f"{counted['from_tier']:.0f} of them from the CPU tier, "
            f"first token after {counted['ttft']:.1f} s, "
            f"{same.equal} of {same.total} tokens equal to plain vLLM's"
            + (f", {_mib(most[FIRST])} and {_mib(most[SECOND])} mapped at most" * way.elastic)
        )

    def _rest(self, way: Way, memory: MappedMemory) -> None:
        """Let both engines idle: nothing is reset, what they do not use goes back by itself."""
        self.screen.live(f"{way.name}: idle")
        deadline = time.monotonic() + FALL_SECONDS
        idle = len(MODELS) * self.device.idle
        while sum(memory.look().values()) > idle and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        time.sleep(IDLE_SECONDS)
        self.held[way].idle = sum(memory.look().values())

    def _figures(self, comparison: Comparison) -> list[Row]:
        plain, tiered, ours = (self.held[way] for way in (PLAIN, TIERED, KVPATCH))
        device = self.device
        returning = [answer for answer in ours.answers if answer.turn > 1]
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
                f"{ours.served:,.0f} of {prompts:,}",
                f"{ours.returned['from_tier']:,.0f} from the CPU tier; plain vLLM with its own "
                f"tier {tiered.served:,.0f}, without {plain.served:,.0f}: as many as the order in "
                "which they come and return leaves in its half",
            ),
            Row(
                "to the first token of a returning conversation",
                f"{ours.returned['ttft']:.1f} s, plain vLLM {plain.returned['ttft']:.1f} s",
                f"with its own tier {tiered.returned['ttft']:.1f} s; "
                f"mean of {len(returning)} that return at once, in the order they came"
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
        ]

    def _environment(self, versions: str, machine: dict[str, Any]) -> list[Row]:
        kind = KVPATCH.kind(self.device, FIRST)
        flags = " ".join(f"--{name} {value}" for name, value in kind.arguments.items())
        values = " ".join(f"{name}={value}" for name, value in kind.environment.items())
        return [
            Row("Command", self.command),
            Row("Versions", versions, f"Python {machine['python']}"),
            Row("Models", self.models.words, "float32; one thread each"),
            Row("Engines with kvpatch", f"vllm serve MODEL --enforce-eager {flags}", values),
            Row(
                "Machine",
                f"{machine['cpus']} CPUs, {machine['memory_gib']} GiB, no GPU used",
                f"load of the minute before {machine['load_before']:.1f}",
            ),
            Row("Device", _mib(self.device.size), "host memory standing in for GPU memory"),
        ]

    def _said(self) -> list[Row]:
        """Return what two conversations of each model said, where that is text."""
        if not self.models.real:
            return []
        talks = conversations(self.models.folders[FIRST], self.load).values()
        return report.said(self.held[KVPATCH].answers, [one for each in talks for one in each[:2]])


def _counters(server: Server) -> dict[str, float]:
    """Return where the tokens of a server's prompts came from, and seconds to first tokens."""
    return read(server) | {"ttft": server.metric("vllm:time_to_first_token_seconds_sum")}


def _warm_up(server: Server, talk: Conversation, load: Load) -> None:
    """Send a prompt that no conversation has: a server's first request pays for its set-up."""
    # Backwards, a text has more than twice the tokens.
    backwards = Conversation(0, talk.passage[len(talk.passage) // 4 :: -1])
    with _failures_of(server):
        backwards.ask(server.client, replace(load, answer_tokens=2))
        server.reset_caches()


@contextmanager
def _failures_of(server: Server) -> Iterator[None]:
    """Add the server and the end of its log to an error."""
    try:
        yield
    except (HarnessError, httpx.HTTPError) as error:
        raise server.failure(f"failed under load, {error!r}") from error


def _mib(size: int, unit: str = " MiB") -> str:
    return f"{size >> 20}{unit}"


def _require_memory() -> None:
    free = psutil.virtual_memory().available
    if free < NEEDED_MEMORY:
        raise HarnessError(
            f"only {free / (1 << 30):.1f} GiB of memory are free and the demo needs "
            f"{NEEDED_MEMORY >> 30}, because it runs two vLLM servers; stop other programs first"
        )
