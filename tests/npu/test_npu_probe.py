"""The whole probe, with torch_npu, on the emulated NPU."""

import json
import subprocess
from pathlib import Path

import pytest

from harness import ascend
from kvpatch.ascend.probe import asking
from kvpatch.environ import HOST_DEVICE, HOST_DEVICE_DIR


@pytest.fixture(scope="module", params=ascend.RELEASES)
def found(request, tmp_path_factory):
    """The verdict that the command wrote, and its exit status."""
    folder: Path = tmp_path_factory.mktemp("probe")
    device = {HOST_DEVICE.name: "1GiB", HOST_DEVICE_DIR.name: str(folder)}
    command = [str(ascend.made(request.param)), "-m", "kvpatch.ascend", "probe"]
    done = subprocess.run(
        [*command, "--verdicts", str(folder)],
        env=ascend.environment(request.param, **device),
        capture_output=True,
        text=True,
        check=False,
    )
    path = next((folder / "npu").glob("*.json"), None)
    assert path is not None, done.stdout + done.stderr
    return {**json.loads(path.read_text()), "status": done.returncode}


def test_every_question_is_answered_right(found):
    judged = {one: said for one, said in found["answers"].items() if one not in asking.TOLD_ONLY}
    assert {one: said["words"] for one, said in judged.items() if not said["right"]} == {}
    assert (found["verdict"], found["status"]) == ("right", 0)


def test_its_verdict_says_that_the_device_is_emulated(found):
    assert found["machine"]["emulated"] is True
