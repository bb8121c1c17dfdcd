"""Rules on engine configurations, checked before an engine starts.

The rules of a feature are in its ``rules.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NamedTuple

from kvpatch import supported
from kvpatch.logs import log
from kvpatch.patch import load
from kvpatch.refusal import CODES, Basis, Code, Refusal
from kvpatch.versions import Facts, Span

Config = Any
Check = Callable[[Config, Facts], bool]


class Rule(NamedTuple):
    """One kind of configuration that is refused.

    Attributes:
        code: one of ``refusal.CODES``, with one rule each.
        kind: the configurations that it refuses, for the documentation.
        applies: whether a ``VllmConfig`` is of that kind.
        what: the subject of the refusal: a text, or a function of the configuration.
        why, remedy: the rest of the refusal; in it and in ``what``, "this release" is named.
        only_in: the releases in which it applies; None for all of them.
        unless_validated: it applies to all releases except validated ones of this span.
        with_connector: applies only if a KV connector is configured, because
            kvcached alone runs as it would without kvpatch.
        warns: what to tell the operator about a configuration that it does not refuse;
            empty for nothing.
        last: asked after the others, whose reasons are more exact.
    """

    code: str
    kind: str
    applies: Check
    what: str | Callable[[Config, Facts], str]
    why: str
    remedy: str
    only_in: Span | None = None
    unless_validated: Span | None = None
    with_connector: bool = True
    warns: Callable[[Config, Facts], str] | None = None
    last: bool = False

    @property
    def fault(self) -> Code:
        """The meaning and basis of its code."""
        return CODES[self.code]

    def refusal(self, config: Config, facts: Facts) -> Refusal | None:
        """Return the refusal if the rule applies to ``config``, else None."""
        if self.only_in is not None and supported.release_of(facts.vllm) not in self.only_in:
            return None
        if self.unless_validated is not None and supported.is_validated(
            facts.vllm, self.unless_validated
        ):
            return None
        if not self.applies(config, facts):
            return None
        what = self.what if isinstance(self.what, str) else self.what(config, facts)
        # Whoever reads it may have several, or not know which one was judged.
        named = f"vLLM {facts.vllm.public}"
        what, why = (text.replace("this release", named) for text in (what, self.why))
        return Refusal(what, why, f"{self.remedy}, or set KVPATCH=0", code=self.code)


def of(references: Iterable[str | None]) -> tuple[Rule, ...]:
    """Return the rules that ``references`` name, in their order but for the last ones."""
    every = (rule for reference in references if reference for rule in load(reference))
    return tuple(sorted(every, key=lambda rule: rule.last))


def refusals(config: Config, facts: Facts, rules: Iterable[Rule]) -> Iterator[Refusal]:
    """Iterate over the refusals of all rules that a ``VllmConfig`` breaks."""
    for rule in _asked(config, rules):
        refusal = rule.refusal(config, facts)
        if refusal is not None:
            yield refusal


def _asked(config: Config, rules: Iterable[Rule]) -> Iterator[Rule]:
    """Iterate over the rules that are for a ``VllmConfig``, with or without a connector."""
    transfer = config.kv_transfer_config
    connector = transfer is not None and transfer.kv_connector is not None
    for rule in rules:
        if connector or not rule.with_connector:
            yield rule


def check(
    config: Config, facts: Facts, rules: Iterable[Rule], lifted: Container[str] = ()
) -> Refusal | None:
    """Return the refusal of the first rule that a ``VllmConfig`` breaks, or None.

    A known fault goes before what is only not validated, whose sentence offers to verify it.
    Logs the warnings about a configuration that breaks none.

    Args:
        config: vLLM's configuration.
        facts: the facts of the process that would run it.
        rules: in the order in which they are checked.
        lifted: codes of rules to skip, for tests of the fault behind them.
    """
    facts = facts._replace(readings={})  # a refusal must not contradict what it is made for
    asked = [rule for rule in _asked(config, rules) if rule.code not in lifted]
    first: Refusal | None = None
    for refusal in refusals(config, facts, asked):
        if refusal.basis is Basis.INCOMPATIBLE:
            return refusal
        first = first or refusal
    if first is None:
        for warning in warnings(config, facts, asked):
            log.warning("kvpatch: %s", warning)
    return first


def warnings(config: Config, facts: Facts, rules: Iterable[Rule]) -> Iterator[str]:
    """Iterate over what rules tell the operator about a ``VllmConfig`` that breaks none."""
    for rule in _asked(config, rules):
        if rule.warns is not None and (warning := rule.warns(config, facts)):
            yield warning
