"""What plain vLLM finds again in its CPU tier beside drafts by mtp."""

from dataclasses import replace

import pytest

from harness.engines.runs import Run
from harness.matrix.cells import Engines, Trial

RELEASE = "0.33.0"
WINDOWS = Run(kvpatch=False, model="sliding", vllm=RELEASE, runner="v2")
STATES = replace(WINDOWS, model="hybrid", dtype="bfloat16", together=1)
CHUNKS = replace(STATES, extra=(("block_size", 256),))


@pytest.mark.parametrize("wanted", [WINDOWS, CHUNKS], ids=["windows", "chunks of a hybrid"])
def test_plain_vllm_finds_nothing_beside_mtp(tmp_path, wanted):
    """The reason of KVP395: without drafts it finds all that was asked before."""
    engines = Engines(RELEASE, tmp_path, print)
    for speculation, finds in (("mtp", False), ("", True)):
        run = replace(wanted, speculation=speculation, experts=bool(speculation))
        again = engines.run(run, Trial({}), speculation or "without")["rounds"][1]
        assert [bool(one["cached"]) for one in again] == [finds] * len(again)
