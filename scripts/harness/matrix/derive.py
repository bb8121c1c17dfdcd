"""The verdict of a cell: by the gates, the patches and the rules, and by the recorded runs."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import replace
from functools import cache

from packaging.version import Version

from harness.matrix import axes, npus, plain, recorded, shapes
from kvpatch import admitted, gate, patches, rules, supported
from kvpatch.environ import ALLOW_VLLM
from kvpatch.matrix.verdicts import CONNECTORS, NONE, Cell, Kind, Matrix, Tried, Verdict
from kvpatch.refusal import Basis, Refusal
from kvpatch.versions import Installed


def refusal(cell: Cell, tried: bool = False, lifted: Container[str] = ()) -> Refusal | None:
    """Return the refusal of start-up, or None if the cell starts.

    With ``tried``, as if ``KVPATCH_ALLOW_VLLM`` named the release of vLLM. Rules whose codes are
    ``lifted`` are not asked.
    """
    of_releases: Refusal | None = _of_releases(cell.vllm, tried)
    if of_releases is not None:
        return of_releases
    every = rules.of(feature.rules for feature in patches.FEATURES)
    facts = axes.facts_of(cell, axes.feature_of(cell).device)
    return rules.check(axes.configuration_of(cell), facts, every, lifted)


@cache
def _of_releases(vllm: str, tried: bool) -> Refusal | None:
    """Return the refusal of the gates, which depend on the releases only."""
    environment = {ALLOW_VLLM.name: vllm} if tried else {}
    installed = Installed.release("vllm", vllm)
    refusal = gate.check_installed("vllm", [installed], environment)
    if refusal is not None:
        return refusal
    kvcached = shapes.releases("kvcached")[supported.KVCACHED[-1]]
    look = shapes.look(shapes.releases("vllm")[vllm], kvcached)
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
        *axes.connector_of(cell).needs,
        *(("Model Runner V2",) if cell.runner == "V2" else ()),
    )
    present: dict[str, str | None] = shapes.releases("vllm")[cell.vllm].targets
    for need in needs:
        if present.get(shapes.PRESENCE[need]) is None:
            return need
    feature = axes.feature_of(cell)
    if cell.runner == "V2" and Version(cell.vllm) < Version(feature.v2_since):
        return f"{feature.name} in Model Runner V2"
    return None


def verdict(cell: Cell) -> Verdict:
    """Return the verdict of one cell."""
    need = missing(cell)
    if need is not None:
        return Verdict(Kind.ABSENT, f"vLLM {cell.vllm} has no {need}")
    refused = refusal(cell)
    by_level = {run.level: run for run in recorded.runs().get(cell, ())}
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
    if not here or not _is_between(cell.vllm, found):
        return []
    return [*here, *(run.file for run in found.values())]


def _is_between(vllm: str, ran: Collection[str]) -> bool:
    """Return whether an older and a newer release ran, with every patch in force on this one."""
    versions = sorted(map(Version, ran))
    is_between = bool(versions) and versions[0] < Version(vllm) < versions[-1]
    return is_between and _in_force(vllm) <= set[str]().union(*map(_in_force, ran))


def ran_with(name: str) -> dict[str, set[str]]:
    """Return the connectors that a name of ``axes.TRIED`` ran right with, by release.

    With kinds of model that start only where they ran, by ``admitted.kind_of``.
    """
    found: dict[str, set[str]] = {}
    for cell in recorded.runs():
        if cell.feature == name and ran_right(cell):
            kind = admitted.kind_of(cell.connector, cell.model)
            found.setdefault(cell.vllm, set()).add(kind)
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
            if _is_between(vllm, [one for one, of in ran.items() if connector in of]):
                connectors.add(connector)
        if connectors:
            admits[vllm] = sorted(connectors)
    return admits


def _with_less(cell: Cell) -> Cell | None:
    """Return the cell without a feature, or with the plainest kind of model; None if it is that."""
    if cell.feature != NONE:
        return replace(cell, feature=NONE)
    return replace(cell, model=axes.MODELS[0].name) if axes.model_of(cell).admitted else None


def _files(cell: Cell) -> list[str]:
    """Return the result files that a cell is validated by or inferred from, or none."""
    run = _engine_run(cell)
    return [run.file] if run is not None else by_shared_seams(cell)


def ran_right(cell: Cell) -> bool:
    """Return whether an engine run of a cell is recorded that was right."""
    return _engine_run(cell) is not None


def _engine_run(cell: Cell) -> recorded.Run | None:
    """Return the engine run of a cell if it was right."""
    runs = recorded.runs().get(cell, ())
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


def tried() -> dict[str, Tried]:
    """Return on which releases each of ``axes.TRIED`` ran and is inferred, by connector."""
    found: dict[str, Tried] = {}
    for name in axes.TRIED:
        ran, starts = ran_with(name), admitted_with(name)
        by_connector = {}
        for connector in dict.fromkeys(
            admitted.kind_of(one, model) for model in admitted.KINDS for one in CONNECTORS
        ):
            on = [vllm for vllm, of in ran.items() if connector in of and vllm in starts]
            more = [vllm for vllm, of in starts.items() if connector in of and vllm not in on]
            if on or more:
                by_connector[connector] = (on, more)
        if by_connector:
            found[name] = by_connector
    return found


def verdicts(vllm: str | None = None) -> dict[Cell, Verdict]:
    """Return the verdict of every cell, or of those of one release of vLLM."""
    return {cell: verdict(cell) for cell in axes.cells(vllm)}


def matrix() -> Matrix:
    """Return the matrix that the wheel has, see ``kvpatch.matrix.verdicts``."""
    return Matrix(verdicts(), npus.verdicts(), tried())


def forget() -> None:
    """Clear what is cached of the patches and the results."""
    _of_releases.cache_clear()
    _in_force.cache_clear()
    shapes.releases.cache_clear()
    recorded.forget()
    plain.forget()
    admitted.forget()


def lost(found: Mapping[Cell, Verdict]) -> list[Cell]:
    """Return the cells that an engine run validated and that are no longer validated."""
    ran = (cell for cell in recorded.runs() if ran_right(cell))
    kinds = {
        cell: found[cell].kind if cell in found else verdict(cell).kind if is_tried(cell) else None
        for cell in ran
    }
    return [cell for cell, kind in kinds.items() if kind is not Kind.VALIDATED]


def is_tried(cell: Cell) -> bool:
    """Return whether what is turned on in a cell is no axis of the matrix."""
    return cell.feature in axes.TRIED
