"""Computation on the emulated NPU: right, in the order of streams, or an error."""

from pathlib import Path

import pytest

from harness import ascend


@pytest.fixture(scope="module", params=ascend.RELEASES)
def seen(request, tmp_path_factory):
    """What the comparisons saw."""
    ledger: Path = tmp_path_factory.mktemp("ledger")
    return ascend.drive(request.param, ledger, "ascend_operators")


def test_operators_of_torch_are_right(seen):
    assert [name for name, right in seen["torch"].items() if not right] == []


def test_operators_that_a_dense_model_needs_are_right(seen):
    assert [name for name, right in seen["model"].items() if not right] == []


def test_computation_waits_for_what_its_stream_waits_for_only(seen):
    assert seen["order"] == {"not ordered": True, "ordered": True}


def test_what_is_not_there_is_an_error(seen):
    assert [name for name, was in seen["refused"].items() if not was] == []
