"""The steps of docs/containers/Dockerfile that install kvpatch, in a plain environment.

Its other step compiles kvcached's extension against CUDA's, which is not here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpatch.version import VERSION

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "docs/containers/Dockerfile").read_text()


def steps() -> list[tuple[str, str]]:
    """Every instruction and what it says, as Docker reads them."""
    lines = "\n".join(line for line in DOCKERFILE.splitlines() if not line.startswith("#"))
    joined = re.sub(r"\\\n\s*", "", lines)
    return [tuple(line.split(" ", 1)) for line in joined.splitlines() if line]


@pytest.fixture
def step(bare, tmp_path):
    """Run a RUN step with this machine's folders in the place of the image's."""
    folder = tmp_path / "dist"
    path = tmp_path / "path"
    path.mkdir()
    python = path / "python3"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (path / "kvpatch").symlink_to(bare.python.with_name("kvpatch"))

    def step(command: str, source: Path) -> subprocess.CompletedProcess[str]:
        here = command.replace("/src", str(source)).replace("/dist", str(folder))
        # Nothing is downloaded: the build's requirements are those of the tests.
        pip = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_PYTHON": str(bare.python)}
        if " wheel " in here:
            del pip["PIP_PYTHON"]
        return subprocess.run(
            ["sh", "-euc", here],
            env=os.environ | pip | {"KVPATCH": "0", "PATH": f"{path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )

    return step


def test_its_steps_install_kvpatch(step, bare, run):
    commands = [words for name, words in steps() if name == "RUN" and "kvcached==" not in words]
    assert len(commands) == 2
    for command in commands:
        done = step(command, ROOT)
        assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"kvpatch {VERSION}\n")
    settings = dict(words.split("=") for name, words in steps() if name == "ENV")
    assert settings == {"KVPATCH": "1"}
    refused = run(bare.python, "-c", "import vllm", **settings)
    assert refused.last_line.startswith("kvpatch refuses to start vLLM: vllm 0.17.9")


def test_what_docker_is_given_builds_the_wheel(step, tmp_path):
    """.dockerignore leaves out what is not named in it."""
    ignored = (ROOT / "docs/containers/Dockerfile.dockerignore").read_text().splitlines()
    context = tmp_path / "context"
    context.mkdir()
    for name in (line[1:] for line in ignored if line.startswith("!")):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).symlink_to(ROOT / name)
    (command,) = [words for name, words in steps() if name == "RUN" and " wheel " in words]
    done = step(command, context)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "dist").iterdir()] == [
        f"kvpatch-{VERSION}-py3-none-any.whl"
    ]
