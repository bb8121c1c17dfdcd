"""The verdicts of vllm-ascend on an NPU: right on the ACL emulator is a verdict of its own.

A cell is a release of vllm-ascend and a connector; everything else is as in the engine that ran.
It is given by a recorded run only. Where none is recorded a cell is not validated, as is one that
a rule refuses.
"""

from collections.abc import Iterator
from functools import reduce
from types import SimpleNamespace
from typing import Any

from harness.matrix import axes, recorded
from kvpatch import patches, rules, supported
from kvpatch.matrix.verdicts import Cell, Kind, Verdict
from kvpatch.patches.ascend import presence, ran
from kvpatch.refusal import Basis, Refusal

NOT_RECORDED = "no engine run on the ACL emulator is recorded"
# What the engine that ran has besides its connector.
_MODEL, _RUNNER, _LAYOUT = "full attention", "V1", "non-contiguous"


def cell(ascend: str, connector: str) -> Cell:
    """Return the cell of a release of vllm-ascend and a connector, by its name in the axes."""
    return Cell(supported.VLLM_ASCEND[ascend], _RUNNER, _LAYOUT, connector, _MODEL)


def cells() -> Iterator[tuple[str, Cell]]:
    """Yield every release of vllm-ascend with each of its cells."""
    for ascend in supported.VLLM_ASCEND:
        for connector in axes.CONNECTORS:
            yield ascend, cell(ascend, connector.name)


def verdict(ascend: str, of: Cell) -> Verdict:
    """Return the verdict of a cell."""
    refused = refusal(ascend, of)
    if refused is not None:
        incompatible = refused.basis is Basis.INCOMPATIBLE
        return Verdict(Kind.INCOMPATIBLE if incompatible else Kind.NOT_VALIDATED, str(refused))
    runs = recorded.on_npu().get(of)
    if not runs:
        return Verdict(Kind.NOT_VALIDATED, NOT_RECORDED)
    return Verdict(Kind.EMULATED if runs[-1].right else Kind.WRONG, runs[-1].file)


def verdicts() -> dict[tuple[str, Cell], Verdict]:
    """Return the verdict of every cell."""
    return {(ascend, of): verdict(ascend, of) for ascend, of in cells()}


def refusal(ascend: str, of: Cell) -> Refusal | None:
    """Return the refusal of start-up on the emulator, or None if the cell starts there."""
    facts = axes.facts_of(of, "npu")
    return presence.refused(ascend, of.vllm, presence.EMULATOR) or rules.check(
        configuration_of(of), facts, rules.of(feature.rules for feature in patches.FEATURES)
    )


def configuration_of(of: Cell) -> Any:
    """Return the ``VllmConfig`` of the engine that ran, with the connector of a cell."""
    made = axes.configuration_of(of)
    made.cache_config.kv_cache_memory_bytes = 1  # that it is set matters, not to what
    for path in ran.PATHS:
        value = ran.RAN[path][0]
        if value is not None and path != "kv_transfer_config.kv_connector":
            *owners, name = path.split(".")
            setattr(reduce(_part, owners, made), name, value)
    return made


def _part(of: Any, name: str) -> Any:
    if not hasattr(of, name):
        setattr(of, name, SimpleNamespace())
    return getattr(of, name)
