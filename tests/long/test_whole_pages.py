"""Engines whose KV cache does not fill kvcached's pages: refused, or with shorter requests."""

import pytest

from harness.engines.runs import BLOCK, Finished, Run, prompts

PAGE = 32  # blocks of a page with one rank; each rank has half the heads of a block
ANSWER = 8
SMALL = {
    "offloading": Run(blocks=PAGE - 1),
    "no connector on Runner V2": Run(blocks=PAGE - 1, runner="v2", offload=False),
    "two ranks": Run(blocks=2 * PAGE - 1, ranks=2),
}


@pytest.fixture
def start(serve):
    """Start an engine with a ``max_model_len``, and let it answer a request of so many tokens."""

    def start(run: Run, longest: int, length: int) -> Finished:
        asked = prompts(1, length=length - 9 - ANSWER, max_tokens=ANSWER)
        return serve(run, rounds=[asked], engine={"max_model_len": longest})

    return start


@pytest.mark.parametrize("kind", SMALL)
def test_less_than_a_page_does_not_start(kind, start):
    ended = start(SMALL[kind], 512, 100)
    assert ended.code != 0
    assert "of which kvcached's whole pages hold none" in ended.log
    assert "[KVP425]" in ended.log


def test_the_longest_request_of_a_length_that_vllm_chose_is_answered(start):
    longest = (4 * PAGE - 1) * BLOCK
    ended = start(Run(blocks=4 * PAGE + 12), -1, longest)
    (answer,) = ended.round(0)
    assert len(answer["tokens"]) == ANSWER
    assert f"max_model_len is {longest} instead of {longest + 12 * BLOCK}" in ended.log


def test_a_pipeline_whose_stages_have_other_layers_does_not_start(start):
    of_stages = Run(stages=2, offload=False, environment=(("VLLM_PP_LAYER_PARTITION", "1,3"),))
    ended = start(of_stages, 512, 100)
    assert ended.code != 0
    assert "the stages of this pipeline have KV caches of" in ended.log
    assert "[KVP428]" in ended.log
