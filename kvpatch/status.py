"""The facts of this process, and the status line.

``kvpatch.status()`` is a call of this module: an import of a submodule replaces a function of its
name in the package, so that the function has to be where the module is.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from kvpatch.logs import debug_if_asked, log
from kvpatch.patch import AppliedPatch, Outcome
from kvpatch.telemetry import publisher
from kvpatch.verdicts import Verified
from kvpatch.version import VERSION
from kvpatch.versions import Facts

if TYPE_CHECKING:
    from kvpatch.api import Process


@dataclass
class Record:
    """The facts of one process.

    Attributes:
        facts: the facts that passed the gates; None before that.
        features: the outcome of each feature.
        rules: references to the rules of the features, see ``rules.of``.
        lifted: codes of rules that tests skip.
        early: codes that ``kvpatch verify``, or its verdicts on these versions, lift before the
            configuration is known.
        verified: the verdict that holds for the configuration, and what it lifts; None without.
        applied: the patches in force.
        roles: ``frontend``, ``engine-core``, ``worker``.
        layout: the KV cache layout in the words of the status line.
        elastic: whether the KV cache is on kvcached's memory; None without a KV cache.
        said_by: pid of the process that logged the line; a forked child inherits this.
    """

    facts: Facts | None = None
    features: dict[str, Outcome] = field(default_factory=dict)
    rules: list[str] = field(default_factory=list)
    lifted: frozenset[str] = frozenset()
    early: frozenset[str] = frozenset()
    verified: Verified | None = None
    applied: list[AppliedPatch] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    layout: str = ""
    elastic: bool | None = None
    said_by: int = 0

    @property
    def skipped(self) -> frozenset[str]:
        """The codes of refusals that do not stop this process."""
        return self.lifted | (self.verified.codes if self.verified else frozenset())

    @property
    def vllm(self) -> str:
        """The distribution and version of vLLM."""
        vllm = self.facts and self.facts.vllm
        return f"{vllm.distribution} {vllm.text}" if vllm else ""

    @property
    def kvcached(self) -> str:
        """The version of kvcached."""
        return self.facts.kvcached.text if self.facts else ""

    def line(self) -> str:
        """The status line: process, versions, features and memory."""
        features = ", ".join(f"{name} {outcome.value}" for name, outcome in self.features.items())
        elastic = {True: "yes", False: "no", None: "not in this process"}[self.elastic]
        return (
            f"kvpatch {VERSION}: pid {os.getpid()}, "
            f"role {' and '.join(self.roles)}, {self.vllm}, kvcached {self.kvcached}, "
            f"features: {features}; {self.layout}{'; ' if self.layout else ''}"
            f"KV on elastic memory: {elastic}{self._verified()}"
        )

    def short(self) -> str:
        """The line of an engine, of at most 160 characters; the rest is in ``line``."""
        applied = sum(outcome is Outcome.APPLIED for outcome in self.features.values())
        elastic = {True: "yes", False: "no", None: "not in this process"}[self.elastic]
        layout = f"; {self.layout.partition(' (')[0]}" if self.layout else ""
        return (
            f"kvpatch {VERSION}: pid {os.getpid()}, {self.vllm}, kvcached {self.kvcached}, "
            f"{applied} features{layout}; KV on elastic memory: {elastic}{self._verified()}"
        )

    def _verified(self) -> str:
        if self.verified is None:
            return ""
        date = self.verified.date
        return f"; verified here on {date}" if date else "; runs to be verified"

    def describe(self) -> dict[str, object]:
        """Return the facts for the status page."""
        return {
            "vllm": self.vllm,
            "kvcached": self.kvcached,
            "roles": list(self.roles),
            "elastic": self.elastic,
            "features": {name: outcome.value for name, outcome in self.features.items()},
            "verified": self.verified.date if self.verified else "",
        }

    def say(self) -> None:
        """Log and publish the line once per process; a forked child logs its own.

        An engine's is for the operator; those of its frontend and workers, and the features, are
        for who looks for a fault.
        """
        if not self.said_here():
            self.said_by = os.getpid()
            debug_if_asked()  # from 0.31 vLLM configures logging again, with its arguments
            if "engine-core" in self.roles:
                log.info("%s", self.short())
            log.debug("%s", self.line())
            publisher.process(self.describe)

    def said_here(self) -> bool:
        """Return whether this process, not the one it was forked from, logged its line."""
        return self.said_by == os.getpid()


record = Record()


class _Callable(ModuleType):
    def __call__(self, pid: int | None = None) -> list[Process]:
        from kvpatch import api  # here, because no engine reads status pages

        return api.status(pid)


sys.modules[__name__].__class__ = _Callable
