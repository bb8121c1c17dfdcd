"""What the engines of a cell are asked, without an engine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.engines.runs import Run
from harness.matrix import cells
from kvpatch.matrix import axes

CELL = axes.Cell("0.32.0", "V2", "contiguous", "Offloading", "full attention")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the runs of plain vLLM and of kvpatch's engine for a cell, and its trial."""

    def asked(cell: axes.Cell) -> tuple[Run, Run, cells.Trial]:
        seen: list[tuple[Run, cells.Trial]] = []
        engines = cells.Engines("0.32.0", tmp_path, print)
        monkeypatch.setattr(engines, "run", lambda run, trial, name: seen.append((run, trial)))
        monkeypatch.setattr(cells, "judge", lambda *given: {})
        engines.compare(cell)
        (plain, _), (ours, trial) = seen
        return plain, ours, trial

    return asked


def every_cell() -> list[axes.Cell]:
    return [cell for cell in axes.cells("0.32.0") if cell.layout == "contiguous"]


@pytest.mark.parametrize(
    "cell", every_cell(), ids=lambda cell: "-".join(vars(cell).values()).replace(" ", "-")
)
def test_plain_vllm_has_what_is_turned_on_and_no_connector(asked, cell):
    plain, ours, _ = asked(cell)
    assert (plain.kvpatch, plain.offload, ours.kvpatch, ours.offload) == (False, False, True, True)
    for name in ("speculation", "ranks", "cache_dtype"):
        assert getattr(plain, name) == getattr(ours, name)
    assert plain.model == ours.model == cells.MODELS[cell.model]
    assert plain.runner == ours.runner == cell.runner.lower()


def test_every_feature_of_the_matrix_changes_the_engine(asked):
    assert {one.name for one in axes.FEATURES} == set(cells.FEATURES)
    for feature in axes.FEATURES[1:]:
        cell = replace(CELL, model=feature.models[0], feature=feature.name)
        _, ours, _ = asked(cell)
        without = asked(replace(cell, feature=axes.NONE))[1]
        assert ours != replace(without, asynchronous=ours.asynchronous), feature.name


def test_workers_of_several_ranks_are_given_vllms_own_connectors(asked):
    cell = replace(CELL, connector="Multi", model="latent attention")
    assert asked(cell)[1].inside == ("NothingConnector", "OffloadingConnector")
    several = asked(replace(cell, feature="2 ranks"))[1]
    assert several.inside == ("OffloadingConnector",)
    assert several.ranks == 2
