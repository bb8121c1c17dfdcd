"""Cells of the matrix, one release for each seam; scripts/matrix engine runs all of them."""

import pytest

from harness import releases
from harness.matrix import derive
from harness.matrix.axes import cells
from harness.matrix.cells import Engines
from kvpatch.matrix.verdicts import Kind

VALIDATED = [
    cell
    for vllm in releases.one_for_each_seam()
    for cell in cells(vllm)
    if cell.model == "sliding window" and derive.verdict(cell).kind is Kind.VALIDATED
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """The engines of a release, each wanted run once."""
    work = tmp_path_factory.mktemp("cells")
    made = {vllm: Engines(vllm, work / vllm, print) for vllm in releases.one_for_each_seam()}
    return made.__getitem__


@pytest.mark.parametrize(
    "cell", VALIDATED, ids=lambda cell: "-".join(vars(cell).values()).replace(" ", "-")
)
def test_a_validated_cell_still_is(engines, cell):
    outcome = engines(cell.vllm).compare(cell)
    assert outcome["right"], outcome
