"""The run of the demo, in order."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import psutil

from harness import provenance
from harness.console import HarnessError, Row, Screen
from harness.demo import report
from harness.demo.conversations import Answer, hold, warm_up
from harness.demo.meter import DEVICE_PAGE, Counters, MemoryMeter, counters
from harness.demo.options import Options
from harness.demo.servers import BLOCK_TOKENS, KV_BLOCKS, KVPATCH, PLAIN
from harness.demo.verdict import Comparison, Evidence, compare, failures, returning_ttft
from harness.model_cache import kept_model
from harness.serve import DEVICE_SIZE, POLL_SECONDS, SPARE_PAGES, Server, workspace

NEEDED_MEMORY = 6 << 30
IDLE_SECONDS = 2.5  # shown in the plot; nothing waits for it
FALL_SECONDS = 15
MIB = 1 << 20


@dataclass
class Held:
    """One server's conversations."""

    answers: list[Answer] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)


class Story:
    """One run of the demo."""

    def __init__(self, options: Options, screen: Screen) -> None:
        self.options = options
        self.load = options.load
        self.screen = screen
        self.plain = Held()
        self.ours = Held()
        self.meter = MemoryMeter()
        self.idle_bytes = 0
        self.memory = 0
        self.elastic = False
        self.status_lines: list[str] = []

    def run(self) -> int:
        """Run both servers, compare, report; return the exit status."""
        _require_memory()
        versions = ", ".join(" ".join(one) for one in provenance.versions().items())
        self.screen.say(versions)
        with workspace() as folder:
            model = kept_model(7, self.screen.say)
            self._run(model, folder)
            static_bytes = KV_BLOCKS * block_bytes(model)
        comparison = compare(self.plain.answers, self.ours.answers)
        evidence = Evidence(
            comparison=comparison,
            from_tier=self.ours.counters.from_tier,
            elastic=self.elastic,
            peak_bytes=self.meter.peak,
            idle_bytes=self.idle_bytes,
        )
        found = failures(evidence)
        rows = self._rows(comparison, static_bytes)
        path = report.write(
            report.Content(
                failures=found,
                rows=rows,
                environment=[
                    Row("Command", self.options.command),
                    Row("Versions", versions),
                    *machine(),
                ],
                samples=self.meter.samples,
                phases=self.meter.phases,
                static_bytes=static_bytes,
                plain=self.plain.answers,
                ours=self.ours.answers,
                status_lines=self.status_lines,
            ),
            self.options.report,
        )
        self.screen.figures(rows)
        self.screen.say(f"report: {path}")
        self.screen.verdict(found)
        return 1 if found else 0

    def _run(self, model: Path, folder: Path) -> None:
        """Start both servers at once, then run the conversations on one after the other."""
        os.environ["KVPATCH_HOST_DEVICE"] = DEVICE_SIZE  # for the meter, as for the server
        os.environ["KVPATCH_HOST_DEVICE_DIR"] = str(folder)
        port = self.options.port
        logs = self.options.keep_logs or folder
        with KVPATCH.server(model, folder, logs, port and port + 1, wait=False) as ours:
            with PLAIN.server(model, folder, logs, port, wait=False) as plain:
                self._wait_for(plain, ours)
                self._note_status(ours)
                with _failures_of(plain):
                    self._warm_up(plain)
                    self._converse(plain, self.plain)
                    # The other server is up as well.
                    self.memory = plain.memory() + ours.memory()
            with _failures_of(ours):
                self._warm_up(ours)
                self.meter.start()
                try:
                    self._converse(ours, self.ours)
                    self._rest(ours)
                finally:
                    self.meter.stop()

    def _wait_for(self, *servers: Server) -> None:
        self.screen.say("starting both servers (about half a minute)")
        starting = list(servers)
        while starting:
            for server in list(starting):
                if server.ready():
                    starting.remove(server)
                    self.screen.say(f"{server.name}: ready after {server.start_seconds:.0f} s")
            names = " and ".join(server.name for server in starting)
            self.screen.live(f"starting {names}, {self.screen.seconds:.0f} s")
            time.sleep(POLL_SECONDS)

    def _note_status(self, server: Server) -> None:
        self.elastic, self.status_lines = server.elastic, server.status_lines
        found = "yes" if self.elastic else "not reported"
        style = "" if self.elastic else "red"
        self.screen.say(f"{server.name}: KV on elastic memory: {found}", style)

    def _warm_up(self, server: Server) -> None:
        self.screen.live(f"{server.name}: warming up")
        warm_up(server.client, self.load)
        server.reset_caches()

    def _converse(self, server: Server, held: Held) -> None:
        before = seen = counters(server.metrics())
        ours = server.name == KVPATCH.name
        expected = {(a.conversation, a.turn): a for a in self.plain.answers} if ours else {}
        if ours:
            self.meter.phase("turn 1")
        for answer in hold(server.client, self.load):
            now = counters(server.metrics())
            answer.from_tier = now.since(seen).from_tier
            answer.from_cache = now.since(seen).from_cache
            seen = now
            held.answers.append(answer)
            text = (
                f"{server.name}: turn {answer.turn} of {self.load.turns}, conversation "
                f"{answer.conversation} of {self.load.conversations}, {len(answer.prompt)} tokens"
            )
            if ours:
                right = [expected[answer.conversation, answer.turn]]
                same = compare(right, [answer])
                text += f", {answer.from_tier} from the tier, {same.equal} of {same.total} equal"
                text += f", {self.meter.look().mapped / MIB:.0f} MiB mapped"
            self.screen.live(text)
            if answer.conversation == self.load.conversations:
                self._say_turn(server.name, held, answer.turn)
                if ours and answer.turn < self.load.turns:
                    self.meter.phase(f"turn {answer.turn + 1}")
        held.counters = counters(server.metrics()).since(before)

    def _say_turn(self, name: str, held: Held, turn: int) -> None:
        """Print a line when all conversations have had a turn."""
        answers = [answer for answer in held.answers if answer.turn == turn]
        line = (
            f"{name}: turn {turn} of {self.load.turns}, {len(answers)} answers, "
            f"{sum(len(a.prompt) for a in answers)} prompt tokens, "
            f"first token after {median(a.ttft for a in answers) * 1000:.0f} ms"
        )
        if name == KVPATCH.name:
            right = [answer for answer in self.plain.answers if answer.turn == turn]
            same = compare(right, answers)
            line += (
                f", {sum(a.from_tier for a in answers)} tokens from the CPU tier, "
                f"{same.equal} of {same.total} tokens equal, "
                f"{self.meter.look().mapped / MIB:.0f} MiB mapped"
            )
        self.screen.say(line)

    def _rest(self, server: Server) -> None:
        """Let the server idle, reset its prefix cache, and wait for the memory to fall."""
        self.meter.phase("idle")
        self.screen.live(f"{server.name}: idle")
        # A page of kvcached is a device page in every layer. One is kept for block 0, and one
        # is what all unmapped addresses are mapped to.
        page = layers(server.model) * DEVICE_PAGE
        kept = (int(SPARE_PAGES["KVCACHED_MAX_RESERVED_PAGES"]) + 2) * page
        self.meter.wait_until_at_most(0, IDLE_SECONDS)
        loaded = self.meter.look().mapped
        self.meter.phase("reset")
        server.reset_caches()
        self.idle_bytes = self.meter.wait_until_at_most(kept, FALL_SECONDS).mapped
        self.meter.wait_until_at_most(0, IDLE_SECONDS)
        self.idle_bytes = self.meter.look().mapped
        self.screen.say(
            f"{server.name}: idle, {loaded / MIB:.0f} MiB mapped for the cache; "
            f"after its reset {self.idle_bytes / MIB:.0f} MiB"
        )

    def _rows(self, comparison: Comparison, static_bytes: int) -> list[Row]:
        plain, ours = self.plain, self.ours
        prompt_tokens = sum(len(answer.prompt) for answer in ours.answers)
        returning = [answer for answer in ours.answers if answer.returning]
        cold_ms = returning_ttft(plain.answers) * 1000
        warm_ms = returning_ttft(ours.answers) * 1000
        conversations = f"{self.load.conversations} conversations of {self.load.turns} turns"
        pool = KV_BLOCKS * BLOCK_TOKENS
        longest = sum(len(a.prompt) for a in ours.answers if a.turn == self.load.turns)
        return [
            Row(
                "tokens equal to plain vLLM's",
                f"{comparison.equal:,} of {comparison.total:,}",
                f"{comparison.answers_equal} of {comparison.answers} answers; "
                f"log-probabilities within {comparison.logprob_difference:.1e}",
            ),
            Row(
                "prompt tokens from the CPU tier",
                f"{ours.counters.from_tier:,} of {prompt_tokens:,}",
                f"{sum(a.from_tier for a in returning):,} of "
                f"{sum(len(a.prompt) for a in returning):,} in returning conversations",
            ),
            Row(
                "first token of a returning conversation",
                f"{warm_ms:.0f} ms, not {cold_ms:.0f} ms",
                f"median of {len(returning)}; plain vLLM recomputes "
                f"{sum(len(a.prompt) - a.from_cache for a in plain.answers if a.returning):,} "
                "tokens",
            ),
            Row(
                "KV memory mapped at the peak and after a cache reset",
                f"{self.meter.peak / MIB:.0f} and {self.idle_bytes / MIB:.0f} MiB",
                f"{self.meter.peak // DEVICE_PAGE} and {self.idle_bytes // DEVICE_PAGE} pages of "
                f"2 MiB; plain vLLM holds {static_bytes / MIB:.0f} MiB permanently",
            ),
            Row("stored to the CPU tier", f"{ours.counters.stored / MIB:.1f} MiB"),
            Row("loaded from the CPU tier", f"{ours.counters.loaded / MIB:.1f} MiB"),
            Row(
                "load",
                conversations,
                f"{longest:,} tokens in the last turn, "
                f"{longest / pool:.1f} times the KV cache of {pool:,}",
            ),
            Row("time without set-up", f"{self.screen.seconds:.0f} s"),
            Row(
                "host memory of both servers",
                f"{self.memory / (1 << 30):.2f} GiB",
                "after plain vLLM's conversations, shared pages counted once",
            ),
        ]


@contextmanager
def _failures_of(server: Server) -> Iterator[None]:
    """Add the server and the end of its log to an error."""
    try:
        yield
    except (HarnessError, httpx.HTTPError) as error:
        raise server.failure(f"failed under load, {error}") from error


def machine() -> list[Row]:
    """Return what else the figures depend on."""
    found = provenance.machine()
    return [
        Row("Python", found["python"]),
        Row("Machine", f"{found['cpus']} CPUs, {found['memory_gib']} GiB, no GPU used"),
        Row("Host device", DEVICE_SIZE, "host memory standing in for GPU memory"),
    ]


def block_bytes(model: Path) -> int:
    """Return the bytes of one block of a model's KV cache, in float32."""
    config = json.loads((model / "config.json").read_text())
    heads, size = config["num_key_value_heads"], config["head_dim"]
    return int(config["num_hidden_layers"] * 2 * heads * size * 4 * BLOCK_TOKENS)


def layers(model: Path) -> int:
    """Return the number of layers of a model."""
    return int(json.loads((model / "config.json").read_text())["num_hidden_layers"])


def _require_memory() -> None:
    free = psutil.virtual_memory().available
    if free < NEEDED_MEMORY:
        raise HarnessError(
            f"only {free / (1 << 30):.1f} GiB of memory are free and the demo needs "
            f"{NEEDED_MEMORY >> 30}, because it runs two vLLM servers; stop other programs first"
        )
