"""vLLM's CUDA build with kvpatch's wheel, as far as it starts without a GPU: see harness.cuda."""

import re
from typing import Any

import pytest
from packaging.version import Version

from harness import releases
from harness.cuda import environment, start
from kvpatch import distributions, patches

RELEASE = releases.newest_built()
OLD = {"KVPATCH_STAND_IN_CUDA": "12020"}
TWO = {"KVPATCH_STAND_IN_GPUS": "2"}


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    folder = tmp_path_factory.mktemp("start")
    ranks = {"engine": {"tensor_parallel_size": 2}}
    jobs = {
        "device": start.job(folder, "device"),
        "old driver": start.job(folder, "device", environment=OLD),
        "two GPUs": start.job(folder, "device", environment=TWO),
        "two ranks": start.job(folder, **ranks, environment=TWO),
        "sizes": start.job(folder, "sizes", engine={"gpu_memory_utilization": 0.5}),
        "tier": start.job(folder, "tier"),
        **{code: start.job(folder, **changes) for code, changes in start.ON_A_GPU.items()},
    }
    found = start.started(RELEASE, jobs, folder)
    assert "jobs" in found, found["log"][-4000:]
    print(f"{len(found['patches'])} patches applied; {found['jobs']['device']['ended']}")
    return found


def seen(started: dict[str, Any], job: str) -> str:
    found = started["jobs"][job]
    return str(found.get("reached", found.get("ended")))


def test_vllm_detects_the_gpu_and_loads_all_that_a_gpus_engine_imports(
    started,
):
    found = started["start"]
    assert (found["platform"], found["capability"]) == ("NvmlCudaPlatform", "9.0")
    assert found["torch"].endswith("+cu130")
    assert found["failed"] == {}
    assert found["kernels"]


def test_kvpatch_is_that_of_the_wheel(started):
    site = environment.site_of(RELEASE)
    assert started["start"]["kvpatch"] == str(site / "kvpatch/__init__.py")
    assert not (site / "kvpatch/hostdevice").exists()


def test_every_patch_of_a_gpu_applied(started):
    of_host = {feature.name for feature in distributions.features()}
    wanted = {
        patch.id
        for feature, rows in patches.at(Version(RELEASE))
        if feature.name not in of_host and feature.wanted is None
        for patch in rows
    }
    assert sorted(started["patches"]) == sorted(wanted)


@pytest.mark.parametrize(
    ("job", "said"),
    [
        ("device", "No CUDA GPUs are available"),
        ("old driver", r"The NVIDIA driver on your system is too old \(found version 12020\)\."),
        ("two GPUs", "No CUDA GPUs are available"),
    ],
)
def test_where_cuda_is_initialised_it_says_in_a_sentence_what_is_missing(started, job, said):
    assert re.match(f"RuntimeError: {said}", seen(started, job)), started["jobs"][job]
    assert "init_device" in started["jobs"][job]["trace"]


def test_without_a_driver_the_start_is_refused_in_a_sentence(tmp_path):
    log = start.started(RELEASE, {}, tmp_path, driver=False)["log"]
    assert re.fullmatch(
        "kvpatch refuses to start vLLM: kvcached is built for a GPU, and this machine has no "
        r"driver for one, because it failed with ImportError: libcuda\.so\.1: .* \[KVP501\]",
        log.rstrip().splitlines()[-1],
    )


@pytest.mark.parametrize("code", start.ON_A_GPU)
def test_what_is_refused_on_a_gpu_is_refused_there(started, code):
    assert re.fullmatch(
        rf"kvpatch\.refusal\.Refusal: kvpatch refuses to start vLLM: .* \[{code}\]",
        seen(started, code),
    )


def test_two_ranks_are_configured_on_two_gpus(started):
    assert seen(started, "two ranks") == "V2"


def test_kvcached_takes_of_the_device_what_was_asked_for(started):
    assert int(seen(started, "sizes")) == pytest.approx(0.5 * (80 << 30), rel=0.01)


def test_the_tier_has_the_chunks_that_fit(started):
    chunks, block = map(int, re.findall(r"\d+", seen(started, "tier")))
    assert chunks == start.GIB // block


def test_every_combination_is_configured_or_refused_as_the_matrix_says(tmp_path):
    cells = start.representatives(RELEASE)
    assert {cell.layout for cell in cells} == {"contiguous", "non-contiguous"}
    assert start.differing(RELEASE, tmp_path, cells) == {}
