"""Weights that are replaced before vLLM 0.24, whose connectors keep the blocks of the old ones."""

import pytest

from harness import releases
from harness.engines.oracle import same_tokens
from harness.engines.runs import Run, prompts

PROMPTS = [[prompt] for prompt in prompts(3)]
WITH_SIMPLE = releases.between("0.19", before="0.24")


@pytest.mark.parametrize(
    ("vllm", "simple"),
    [
        *((vllm, "") for vllm in releases.between("0.16", before="0.24")),
        *((vllm, "eager") for vllm in WITH_SIMPLE),
    ],
)
def test_the_call_is_refused_and_the_engine_goes_on_with_its_weights(serve, trained, vllm, simple):
    reload = {"reload": [3], "reload_from": str(trained), "reset_on_reload": {}}
    ended = serve(Run(vllm=vllm, simple=simple), rounds=PROMPTS * 2, **reload)
    rounds = [ended.round(index) for index in range(6)]
    refused = ended.result["refused"]
    assert refused.startswith("kvpatch refuses the call: reload_weights is called on an engine ")
    assert refused.endswith(" [KVP353]")
    before = [one for answers in rounds[:3] for one in answers]
    after = [one for answers in rounds[3:] for one in answers]
    assert same_tokens(before, after) == 3
