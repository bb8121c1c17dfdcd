"""The verdict of a cell, and its evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache

from packaging.version import Version

from kvpatch import admitted, gate, patches, rules, supported
from kvpatch.environ import ALLOW_VLLM
from kvpatch.matrix import evidence, plain, signatures
from kvpatch.matrix.axes import (
    MODELS,
    NONE,
    TRIED,
    Cell,
    cells,
    configuration_of,
    connector_of,
    feature_of,
    model_of,
)
from kvpatch.refusal import Basis, Refusal
from kvpatch.versions import Facts, Installed


class Kind(str, Enum):
    """The possible verdicts; a committed matrix has only the first seven.

    ``INFERRED`` starts as ``VALIDATED`` does, and no engine of that cell ran: see
    ``by_shared_seams``.
    ``EMULATED`` is of cells on NPUs only, see ``npu``: no run on the emulator validates another.
    ``NO_CPU_ENGINE`` is not validated, and cannot be on a CPU: plain vLLM itself ends there.
    """

    VALIDATED = "validated"
    INFERRED = "inferred"
    EMULATED = "validated (ACL emulator)"
    INCOMPATIBLE = "incompatible"
    NOT_VALIDATED = "not validated"
    NO_CPU_ENGINE = "not validated (no engine on a CPU runs it)"
    ABSENT = "absent in this release"
    UNTESTED = "UNTESTED"
    WRONG = "WRONG"

    @property
    def starts(self) -> bool:
        """Whether start-up admits it, by what ran."""
        return self in (Kind.VALIDATED, Kind.INFERRED)

    @property
    def refused(self) -> bool:
        """Whether start-up refuses it."""
        return self in (Kind.INCOMPATIBLE, Kind.NOT_VALIDATED, Kind.NO_CPU_ENGINE)

    @property
    def red(self) -> bool:
        """Whether a committed matrix must not contain it."""
        return self in (Kind.UNTESTED, Kind.WRONG)


@dataclass(frozen=True)
class Verdict:
    """The verdict of a cell, and its evidence.

    Attributes:
        kind: the kind of verdict.
        why: the refusal, or the result file.
        tagged: for a refused cell, the result file of a run with correct tagged blocks.
        ended: for a cell that is not validated, with what plain vLLM ends on a CPU.
    """

    kind: Kind
    why: str
    tagged: str = ""
    ended: str = ""


def refusal(cell: Cell, tried: bool = False, lifted: Container[str] = ()) -> Refusal | None:
    """Return the refusal of start-up, or None if the cell starts.

    With ``tried``, as if ``KVPATCH_ALLOW_VLLM`` named the release of vLLM. Rules whose codes are
    ``lifted`` are not asked.
    """
    of_releases: Refusal | None = _of_releases(cell.vllm, tried)
    if of_releases is not None:
        return of_releases
    facts = Facts(
        vllm=Installed.release("vllm", cell.vllm),
        kvcached=Installed.release("kvcached", supported.KVCACHED[-1]),
        environment=feature_of(cell).environment,
        device=feature_of(cell).device,
        contiguous=cell.layout == "contiguous",
    )
    every = rules.of(feature.rules for feature in patches.FEATURES)
    return rules.check(configuration_of(cell), facts, every, lifted)


@cache
def _of_releases(vllm: str, tried: bool) -> Refusal | None:
    """Return the refusal of the gates, which depend on the releases only."""
    environment = {ALLOW_VLLM.name: vllm} if tried else {}
    installed = Installed.release("vllm", vllm)
    refusal = gate.check_installed("vllm", [installed], environment)
    if refusal is not None:
        return refusal
    kvcached = signatures.releases("kvcached")[supported.KVCACHED[-1]]
    look = signatures.look(signatures.releases("vllm")[vllm], kvcached)
    for feature in patches.FEATURES:
        if feature.wanted is not None:  # specific to a machine or mode, which no cell has
            continue
        verdict = gate.check_feature(feature, installed, look, environment)
        refusal = gate.refusal(feature, verdict)
        if refusal is not None:
            return refusal
    return None


def missing(cell: Cell) -> str | None:
    """Return what a cell needs and its release of vLLM lacks, or None."""
    needs: tuple[str, ...] = (
        *connector_of(cell).needs,
        *(("Model Runner V2",) if cell.runner == "V2" else ()),
    )
    present: dict[str, str | None] = signatures.releases("vllm")[cell.vllm].targets
    for need in needs:
        if present.get(signatures.PRESENCE[need]) is None:
            return need
    feature = feature_of(cell)
    if cell.runner == "V2" and Version(cell.vllm) < Version(feature.v2_since):
        return f"{feature.name} in Model Runner V2"
    return None


def verdict(cell: Cell) -> Verdict:
    """Return the verdict of one cell."""
    need = missing(cell)
    if need is not None:
        return Verdict(Kind.ABSENT, f"vLLM {cell.vllm} has no {need}")
    refused = refusal(cell)
    by_level = {run.level: run for run in evidence.runs().get(cell, ())}
    if refused is None:
        run = by_level.get("engine")
        if run is None:
            others = by_shared_seams(cell)
            if others:
                return Verdict(Kind.INFERRED, " and ".join(others))
            return Verdict(Kind.UNTESTED, "no run of it is recorded")
        other = by_level.get("synchronous", run)
        return Verdict(
            Kind.VALIDATED if run.right and other.right else Kind.WRONG,
            run.file if other.right else other.file,
        )
    tagged = by_level.get("bytes")
    file = tagged.file if tagged and tagged.right else ""
    if refused.basis is Basis.INCOMPATIBLE:
        return Verdict(Kind.INCOMPATIBLE, str(refused), file)
    ended = plain.ended(cell)
    kind = Kind.NO_CPU_ENGINE if ended else Kind.NOT_VALIDATED
    return Verdict(kind, str(refused), file, ended)


def by_shared_seams(cell: Cell) -> list[str]:
    """Return the result files that a cell between two releases is inferred from, or none.

    What it has more than another cell, a feature or a kind of model that starts where it is
    admitted only, ran on an older and on a newer release; the release itself is validated without
    it, and every patch in force on it was in force where it ran.
    """
    less = _with_less(cell)
    here = _files(less) if less is not None else []
    found = {
        vllm: run
        for vllm in supported.validated()
        if (run := _engine_run(replace(cell, vllm=vllm))) is not None
    }
    around = sorted([*found, cell.vllm], key=Version)
    if not here or not around[0] != cell.vllm != around[-1]:
        return []
    ran = set[str]().union(*(_in_force(vllm) for vllm in found))
    if not _in_force(cell.vllm) <= ran:
        return []
    return [*here, *(run.file for run in found.values())]


def ran_with(name: str) -> dict[str, set[str]]:
    """Return the connectors that a name of ``axes.TRIED`` ran right with, by release."""
    found: dict[str, set[str]] = {}
    for cell in evidence.runs():
        if cell.feature == name and ran_right(cell):
            found.setdefault(cell.vllm, set()).add(admitted.kind_of(cell.connector))
    return found


def admitted_with(name: str) -> dict[str, list[str]]:
    """Return the connectors that a name of ``axes.TRIED`` starts with, by release.

    Those that it ran with; and those that it ran with on an older and on a newer release, if every
    patch in force on it was in force on one where it ran.
    """
    ran, admits = ran_with(name), {}
    for vllm in supported.validated():
        connectors = set(ran.get(vllm, ()))
        for connector in set().union(*ran.values()) - connectors:
            on = sorted((one for one, of in ran.items() if connector in of), key=Version)
            is_between = Version(on[0]) < Version(vllm) < Version(on[-1])
            if is_between and _in_force(vllm) <= set().union(*map(_in_force, on)):
                connectors.add(connector)
        if connectors:
            admits[vllm] = sorted(connectors)
    return admits


def _with_less(cell: Cell) -> Cell | None:
    """Return the cell without a feature, or with the plainest kind of model; None if it is that."""
    if cell.feature != NONE:
        return replace(cell, feature=NONE)
    return replace(cell, model=MODELS[0].name) if model_of(cell).admitted else None


def _files(cell: Cell) -> list[str]:
    """Return the result files that a cell is validated by or inferred from, or none."""
    run = _engine_run(cell)
    return [run.file] if run is not None else by_shared_seams(cell)


def ran_right(cell: Cell) -> bool:
    """Return whether an engine run of a cell is recorded that was right."""
    return _engine_run(cell) is not None


def _engine_run(cell: Cell) -> evidence.Run | None:
    """Return the engine run of a cell if it was right."""
    runs = evidence.runs().get(cell, ())
    return next((run for run in runs if run.level == "engine" and run.right), None)


@cache
def _in_force(vllm: str) -> frozenset[str]:
    """Return the ids of the patches of a release, without those of a machine or mode."""
    return frozenset(
        patch.id
        for feature, rows in patches.at(Version(vllm))
        if feature.wanted is None
        for patch in rows
    )


def verdicts(vllm: str | None = None) -> dict[Cell, Verdict]:
    """Return the verdict of every cell, or of those of one release of vLLM."""
    return {cell: verdict(cell) for cell in cells(vllm)}


def forget() -> None:
    """Clear what is cached of the patches and the results."""
    _of_releases.cache_clear()
    _in_force.cache_clear()
    signatures.releases.cache_clear()
    evidence.forget()
    plain.forget()
    admitted.forget()


def lost(found: Mapping[Cell, Verdict]) -> list[Cell]:
    """Return the cells that an engine run validated and that are no longer validated."""
    ran = (cell for cell in evidence.runs() if ran_right(cell))
    kinds = {
        cell: found[cell].kind if cell in found else verdict(cell).kind if is_tried(cell) else None
        for cell in ran
    }
    return [cell for cell, kind in kinds.items() if kind is not Kind.VALIDATED]


def is_tried(cell: Cell) -> bool:
    """Return whether what is turned on in a cell is no axis of the matrix."""
    return cell.feature in TRIED


def counts(found: Iterable[Verdict]) -> dict[str, int]:
    """Return how many cells have each verdict, without verdicts that no cell has."""
    counted = Counter(verdict.kind for verdict in found)
    return {kind.value: counted[kind] for kind in Kind if counted[kind]}
