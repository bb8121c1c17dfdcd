"""Reading a release's sources: scripts/matrix and scripts/new-vllm, on sources that are made up."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from harness.matrix import record, shapes
from harness.matrix.sources import Source

ROOT = Path(__file__).parents[2]
RELEASES = ("vllm-0.28.0", "kvcached-0.1.6", "vllm_ascend-0.23.0")
PLANNER = "vllm/distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py"


def materialize(made, folder):
    """Write sources that have exactly the recorded targets."""
    modules = {}
    for target, said in made.targets.items():
        module, _, path = target.partition(":")
        if module.startswith(f"{made.package}.") and said is not None:
            owner, _, name = path.rpartition(".")
            modules.setdefault(module, {}).setdefault(owner, []).append(definition(name, said))
        elif said is not None:  # added to a class of vLLM's
            patches = modules.setdefault("kvcached.integration.vllm.patches", {})
            name = path.rpartition(".")[2]
            lines = f"def patch():\n    {definition(name, said)}\n    {path} = {name}"
            patches.setdefault("", []).append(lines)
    for module, owners in modules.items():
        path = folder.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        classes = [
            "\n".join([f"class {owner}:", *(f"    {line}" for line in lines)])
            for owner, lines in owners.items()
            if owner
        ]
        bare = [line for line in owners.get("", []) if not is_class(line, owners)]
        path.write_text("\n".join([*classes, *bare, ""]))


def definition(name, said):
    return {"class": f"class {name}: pass", "value": f"{name} = 1"}.get(
        said, f"def {name}{said}: ..."
    )


def is_class(line, owners):
    return line.startswith("class ") and line.split(":")[0].removeprefix("class ") in owners


@pytest.fixture
def unpacked(tmp_path):
    """Unpacked releases: sources with the targets that are recorded of them."""

    def unpacked(name):
        package, _, version = name.partition("-")
        folder = tmp_path / "cache/releases" / name
        if not folder.exists():
            made = shapes.releases(package)[version]
            materialize(made, folder)
            origin = {"archive": made.archive, "sha256": made.sha256}
            (folder / "source.json").write_text(json.dumps(origin))
        return Source(package, version, folder, "", "")

    return unpacked


def edit(source, path, old, new):
    file = source.folder / path
    text = file.read_text()
    assert re.search(old, text)
    file.write_text(re.sub(old, new, text))


def test_sources_are_read_as_they_are_recorded(unpacked):
    for name in RELEASES:
        made = record.read_signatures(unpacked(name))
        assert made.targets == shapes.releases(made.package)[made.version].targets


@pytest.fixture
def checkout(tmp_path):
    """A copy of what scripts/matrix reads and writes."""
    folder = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("kvpatch", "scripts", "docs/results/matrix"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in (folder / "docs/results/matrix").glob("*/*.json"):
        if not path.name.startswith(RELEASES):
            path.unlink()
    return folder


@pytest.fixture
def matrix(run, checkout, tmp_path):
    """Run scripts/matrix of the copy on the unpacked releases."""

    def matrix(*arguments):
        command = (sys.executable, checkout / "scripts/matrix", *arguments)
        return run(*command, PYTHONPATH=checkout, KVPATCH_CACHE=tmp_path / "cache")

    yield matrix


def test_the_script_ends_1_when_a_row_is_red(matrix, unpacked):
    vllm, *_ = map(unpacked, RELEASES)
    done = matrix("shapes", "0.28.0")
    assert done.err == ""
    assert "RED vllm" not in done.out
    edit(vllm, PLANNER, "def build_connector_meta", "def build_metadata")
    done = matrix("shapes", "0.28.0")
    assert done.code == 1
    assert "RED vllm 0.28.0, fence.build: " in done.out


@pytest.fixture
def new_vllm(run, checkout, tmp_path, unpacked):
    """Run scripts/new-vllm on an unpacked copy of 0.28.0 under a later number."""
    source = unpacked("vllm-0.28.0")

    def new_vllm(version):
        shutil.copytree(source.folder, source.folder.with_name(f"vllm-{version}"))
        command = (sys.executable, checkout / "scripts/new-vllm", version, "--sources-only")
        return run(*command, PYTHONPATH=checkout, KVPATCH_CACHE=tmp_path / "cache")

    return new_vllm


def test_a_new_release_that_moved_nothing(new_vllm, checkout):
    done = new_vllm("0.28.9")
    assert (done.code, done.err) == (0, "")
    assert "against 0.28.0" in done.out
    assert "\n0 patches moved, " in done.out
    assert "Left to run, with the line in RELEASES:\n  scripts/environment 0.28.9\n" in done.out
    assert "scripts/matrix engine 0.28.9" in done.out
    assert (checkout / "docs/results/matrix/signatures/vllm-0.28.9.json").exists()


def test_a_new_release_shows_both_signatures_of_what_moved(new_vllm, unpacked):
    edit(unpacked("vllm-0.28.0"), PLANNER, r"\bconnector_output\b", "output")
    done = new_vllm("0.28.9")
    assert done.code == 1
    assert "fence.worker_output: MOVED\n" in done.out
    assert "    0.28.0  (self, connector_output: KVConnectorOutput)\n" in done.out
    assert "    0.28.9  (self, output: KVConnectorOutput)\n" in done.out
    assert 'add a row with since="0.28.9" on top of its seam' in done.out
