"""Verdicts of ``kvpatch verify``: which refusals they lift for a configuration.

The process that makes the configuration decides, before there is an engine; those that vLLM starts
for it inherit the decision. In a run of ``kvpatch verify`` it writes down what runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvpatch import gate, rules, state, verdicts
from kvpatch.environ import VERIFY
from kvpatch.logs import log
from kvpatch.refusal import VERIFIABLE, Refusal
from kvpatch.status import record
from kvpatch.verdicts import Verified
from kvpatch.versions import Facts

MOST_DIFFERENCES = 3  # in a line of the log


def decide(config: Any, facts: Facts) -> None:
    """Let the verdict for a ``VllmConfig`` hold here and in children; refuse releases without."""
    # vLLM derives configurations of parts of a model, also in its workers, which share these.
    shared = (config.cache_config, config.scheduler_config)
    decided = next(filter(None, (state.find(one, Decided) for one in shared)), None)
    if decided is None:
        decided = Decided(_verdict(config, facts))
    for one in shared:
        state.attach(one, decided)
    record.verified = decided.verified
    verdicts.pass_on(decided.verified)
    for refusal in _of_releases(facts):
        if refusal.code not in record.skipped:
            raise refusal


class Decided:
    """What was decided for a configuration, kept on parts of it."""

    def __init__(self, verified: Verified | None) -> None:
        self.verified = verified


def _verdict(config: Any, facts: Facts) -> Verified | None:
    folder = VERIFY.read(facts.environment)
    if not folder and not any(verdicts.files(facts.environment)):
        return None
    from kvpatch.upstream import combination  # few starts need it

    needed = [refusal.code for refusal in _refusals(config, facts)]
    ours = combination.of(config, facts)
    if folder:
        more = {"workers": combination.workers(config), "connectors": combination.copiers(config)}
        _write(Path(folder), {"combination": ours, **more}, needed)
        return Verified("", VERIFIABLE)
    known = verdicts.every(facts.environment)
    found = verdicts.covering(ours, needed, known)
    if found is None:
        if needed and (nearest := verdicts.apart(ours, needed, known)):
            verdict, differences = nearest
            what = "; ".join(differences[:MOST_DIFFERENCES]) or "a wrong one has taken its place"
            log.warning("kvpatch: the verdict %s does not hold here: %s", verdict.path, what)
        return None
    log.debug("kvpatch: the verdict %s holds", found.path)
    return Verified(found.date, found.lifted)


def _refusals(config: Any, facts: Facts) -> Iterable[Refusal]:
    """Iterate over the refusals of a configuration that can be lifted."""
    yield from _of_releases(facts)
    for refusal in rules.refusals(config, facts, rules.of(record.rules)):
        if refusal.code in VERIFIABLE:
            yield refusal


def _of_releases(facts: Facts) -> Iterable[Refusal]:
    for package, installed in (("vllm", facts.vllm), ("kvcached", facts.kvcached)):
        refusal = gate.check_installed(package, [installed], facts.environment)
        if refusal is not None:
            yield refusal


def _write(folder: Path, ran: dict[str, Any], needed: list[str]) -> None:
    """Write down what runs, for ``kvpatch verify``; the first configuration is the command's."""
    if (folder / "combination.json").exists():
        return
    partial = folder / "combination.part"
    partial.write_text(json.dumps(ran))
    partial.replace(folder / "combination.json")
    note(needed)


def lifts(refusal: Refusal) -> bool:
    """Return whether a refusal of a worker is lifted; a run of ``kvpatch verify`` notes it."""
    lifted = refusal.code in record.skipped
    if lifted and VERIFY.read():
        note([refusal.code])
    return lifted


def note(codes: Iterable[str]) -> None:
    """Note that refusals are lifted in a run of ``kvpatch verify``."""
    file = os.open(Path(VERIFY.read()) / "lifted", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, "".join(f"{code}\n" for code in codes).encode())
    finally:
        os.close(file)
