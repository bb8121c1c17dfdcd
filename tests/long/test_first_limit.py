"""A served engine has its first limit before its first request, and answers the same."""

import os
from dataclasses import replace

import pytest

from harness.engines.oracle import PLAIN
from harness.engines.runs import Run
from harness.engines.serving import answers, watched
from kvpatch import control

COUNT = 6
RUN = Run(blocks=300)
KINDS = {
    "offloading": RUN,
    "eager": replace(RUN, simple="eager"),
    "runner v2": replace(RUN, runner="v2"),
}
PLAINS = {"v1": PLAIN, "v2": replace(PLAIN, runner="v2", rounds=("12", "12"))}  # others have them


# Without the variable nothing of it depends on the kind.
@pytest.mark.parametrize(
    ("kind", "text"),
    [("offloading", ""), ("offloading", "50%"), ("eager", "50%"), ("runner v2", "50%")],
)
def test_it_is_limited_from_the_start_and_answers_as_plain_vllm_does(
    kind, text, engine, device, tmp_path
):
    plain = engine(PLAINS[KINDS[kind].runner]).round(0)
    expected = [one["tokens"] for one in plain[:COUNT]]
    name = f"first-{os.getpid()}-{list(KINDS).index(kind)}"
    more = {"KVCACHED_IPC_NAME": name} | ({"KVPATCH_FIRST_LIMIT": text} if text else {})
    with watched(KINDS[kind].within(more), device, tmp_path) as server:
        said = control.find(name).said
        page = control.find(name).demand()["page"]
        if text:
            assert abs(said["limit"] - said["most"] // 2) < page
        else:
            assert said["limit"] == said["most"]
        first = answers(server, COUNT)
        assert control.find(name).said["mapped"] <= said["limit"]
        control.find(name).limit(said["most"])
        assert control.find(name).said["limit"] == said["most"]
        assert answers(server, COUNT) == first == expected


def test_less_than_one_request_does_not_start(device, tmp_path):
    run = RUN.within({"KVPATCH_FIRST_LIMIT": "1%"})
    with pytest.raises(Exception, match="KVP424"), watched(run, device, tmp_path):
        pass
