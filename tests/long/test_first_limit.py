"""A served engine has its first limit before its first request, and answers the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.engines.runs import Device, Run, engine_arguments, prompts
from harness.engines.serving import watched
from kvpatch import control

COUNT = 6
RUN = Run(blocks=300)
KINDS = {
    "offloading": RUN,
    "eager": replace(RUN, simple="eager"),
    "runner v2": replace(RUN, runner="v2"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_limited_from_the_start_and_answers_the_same(
    kind: str, models: Callable[[str], Path], device: Device, tmp_path: Path
) -> None:
    answers = {}
    for text in ("", "50%"):
        name = f"first-{os.getpid()}-{list(KINDS).index(kind)}"
        more = {"KVCACHED_IPC_NAME": name} | ({"KVPATCH_FIRST_LIMIT": text} if text else {})
        run = replace(KINDS[kind], environment=(*KINDS[kind].environment, *more.items()))
        folder = tmp_path / (text.strip("%") or "whole")
        folder.mkdir()
        environment = device.environ(run)
        with watched(models(run.model), engine_arguments(run), environment, folder) as server:
            said = control.find(name).said
            page = control.find(name).demand()["page"]
            if text:
                assert abs(said["limit"] - said["most"] // 2) < page
            else:
                assert said["limit"] == said["most"]
            answers[text] = [server.complete(prompt)["tokens"] for prompt in prompts(COUNT)]
            assert control.find(name).said["mapped"] <= said["limit"]
            control.find(name).limit(said["most"])
            assert control.find(name).said["limit"] == said["most"]
            again = [server.complete(prompt)["tokens"] for prompt in prompts(COUNT)]
            assert again == answers[text]
    assert answers[""] == answers["50%"]


def test_less_than_one_request_does_not_start(
    models: Callable[[str], Path], device: Device, tmp_path: Path
) -> None:
    run = replace(RUN, environment=(*RUN.environment, ("KVPATCH_FIRST_LIMIT", "1%")))
    arguments = engine_arguments(run)
    with (
        pytest.raises(Exception, match="KVP424"),
        watched(models(run.model), arguments, device.environ(run), tmp_path),
    ):
        pass
