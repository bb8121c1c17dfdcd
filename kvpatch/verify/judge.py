"""What was wrong in a run, and what it did not show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvpatch.sizes import readable
from kvpatch.verify.compare import Difference, allowed, noise
from kvpatch.verify.drive import KEPT_PAGES, Seen

# What must have been seen of an engine, and of one that offloads.
ALWAYS = ("aborted", "preempted", "limit moved")
OFFLOADING = ("restored", "restored again", "stored under pressure")
# A machine's free memory moves by less without us.
SEEN_FREE = 256 << 20


@dataclass
class Judgement:
    """The result of a run: what was wrong, right, and what a verdict needs and was not seen."""

    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    right: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        """The verdict: ``right``, ``wrong`` or ``unfinished``."""
        return "wrong" if self.wrong else "unfinished" if self.missing else "right"


def judge_seen(seen: Seen, offloads: bool) -> Judgement:
    """Judge what the engine was seen doing."""
    found = Judgement()
    arms = tuple(what for what in seen.did if what not in ALWAYS + OFFLOADING)
    needed = ALWAYS + (OFFLOADING + arms if offloads else ())
    for what in needed:
        if not seen.did.get(what):
            found.missing.append(f"nothing was {what}")
    did = ", ".join(f"{what} {seen.did.get(what, 0)}" for what in needed)
    found.right.append(f"seen: {did}")
    return found


def judge_bytes(audits: Sequence[dict[str, int]], workers: int, connectors: int) -> Judgement:
    """Judge the restored blocks, compared in each worker: one that is wrong ends it."""
    found = Judgement()
    if len(audits) != workers * connectors:
        found.missing.append(
            f"{len(audits)} audits of copies reported, and {workers} workers with {connectors} "
            "connectors each were expected"
        )
    loaded = sum(audit["loaded"] for audit in audits)
    idle = sum(not (audit["loaded"] or audit["unverified"]) for audit in audits)
    if connectors and not loaded:
        found.missing.append("no restored block was compared")
    elif connectors == 1 and idle:
        found.missing.append(f"{idle} of {workers} workers restored nothing")
    stored = sum(audit["stored"] for audit in audits)
    unverified = sum(audit["unverified"] for audit in audits)
    line = f"bytes: {loaded} restored blocks are what was computed, of {stored} stored"
    named = sum(audit["named"] for audit in audits)
    if named:
        line += f"; {named} also under their block hashes"
    if unverified:
        line += f"; {unverified} that another worker stored were not compared"
    found.right.append(line)
    return found


def judge_memory(seen: Seen) -> Judgement:
    """Judge whether memory was given back."""
    found = Judgement()
    before, after = seen.pages["before"], seen.pages["after"]
    held = readable(after * seen.page_bytes)
    if after > KEPT_PAGES:
        found.wrong.append(
            f"memory was not given back: {after} of {before} pages ({held}) are in use by an "
            "engine without requests and with an empty cache"
        )
    found.right.append(f"memory: {before - after} of {before} pages given back, {held} in use")
    if seen.taken >= SEEN_FREE and seen.freed < seen.taken // 2:
        found.missing.append(
            f"{readable(seen.taken)} were taken back by the host pool, and the free memory of this "
            f"machine grew by {readable(max(0, seen.freed))}"
        )
    if fence := seen.fence:
        found.right.append(
            f"fence: {fence['released']} pages freed, of which {fence['held_for_plan']} waited "
            f"for a plan and {fence['held_for_transfer']} for a transfer"
        )
    return found


def judge_answers(ours: Sequence[Difference], of_itself: Sequence[Difference]) -> Judgement:
    """Judge the answers against plain vLLM's, and that one's against its own."""
    found = Judgement()
    most = allowed(of_itself)
    for one in ours:
        if one.most > most:
            found.wrong.append(
                f"an answer is not plain vLLM's: {one} ({most:.3g} allowed, as plain vLLM is up "
                f"to {noise(of_itself):.3g} from itself)"
            )
    equal = sum(not one.at for one in ours)
    apart = max((one.apart for one in ours), default=0.0)
    found.right.append(
        f"answers: {equal} of {len(ours)} equal to plain vLLM's, log-probabilities up to "
        f"{apart:.3g} apart; plain vLLM against itself: "
        f"{sum(not one.at for one in of_itself)} of {len(of_itself)}, {noise(of_itself):.3g}"
    )
    if not ours:
        found.missing.append("no answer was compared")
    return found


def together(parts: Sequence[Judgement]) -> Judgement:
    """Return several judgements as one."""
    return Judgement(
        [one for part in parts for one in part.wrong],
        [one for part in parts for one in part.missing],
        [one for part in parts for one in part.right],
    )
