"""Requests that are aborted before they have run, or while their prompt is computed."""

from typing import Any

import pytest

from harness import releases
from harness.engines.oracle import assert_same
from harness.engines.runs import ALL, Finished, Run, prompts

RELEASES = releases.between("0.24", before="0.28")
STEPS = (0, 1)  # of four that the prompt takes


@pytest.fixture
def aborts(serve):
    """Run an engine whose first prompt is aborted before it is asked."""

    def run(vllm: str, **more: Any) -> Finished:
        asked = {"rounds": [prompts(ALL)] * 2, "abort_after": STEPS, "watch": True}
        return serve(Run(vllm=vllm, batch=192), **asked, **more)

    return run


@pytest.mark.parametrize("vllm", RELEASES)
def test_an_aborted_request_ends_nothing_and_spoils_nothing(aborts, engine, vllm):
    ours = aborts(vllm)
    assert_same(ours, engine(Run(kvpatch=False, offload=False, vllm=vllm, batch=192)))
    assert [record["cached"] for record in ours.round(1)] == [640] * ALL
    assert ours.result["changed"] == []


def test_without_the_row_it_ends_the_engine_of_0_26(aborts):
    ours = aborts("0.26.0", revert=["offloading.storable_chunks"])
    assert ours.code != 0
    assert "assert len(offload_keys) == len(offload_block_ids)" in ours.log
