"""vllm-ascend's engines on the emulated NPU: static memory, and kvcached's."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness import ascend
from harness.engines.ascend_engine import DEVICE, MANY, SMALL
from harness.matrix import npu
from kvpatch.patches.ascend import ran


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module", params=ascend.RELEASES)
def static(request, folder):
    """vllm-ascend as it is, with its connector on its own memory."""
    return npu.served(request.param, folder, "eager", "0")


@pytest.fixture(scope="module", params=ascend.RELEASES)
def elastic(request, folder):
    """The same on kvcached's memory."""
    return npu.served(request.param, folder, "eager", "1")


def test_the_emulated_npu_computes_what_the_cpu_does(static):
    assert static["rounds"][0]["tokens"] == static["expected"]


def test_static_memory_is_served_back_from_the_tier(static):
    assert [one["cached"] for one in static["rounds"]] == npu.SERVED_BACK
    assert all(one["tokens"] == static["expected"] for one in static["rounds"])


def test_elastic_memory_has_the_tokens_of_static_memory(static, elastic):
    assert all(one["tokens"] == static["expected"] for one in elastic["rounds"])


def test_elastic_memory_is_served_back_from_the_tier(elastic):
    assert [one["emptied"] for one in elastic["rounds"]] == [True] * 3
    assert [one["cached"] for one in elastic["rounds"]] == npu.SERVED_BACK


def test_the_cell_of_the_matrix_is_right(static, elastic):
    trial = npu.TRIALS["Simple eager"]
    assert [what for what, right in npu.judged(static, elastic, trial).items() if not right] == []


def test_the_settings_are_those_that_start(elastic):
    assert elastic["settings"].keys() == ran.RAN.keys()


# The loads beside that of the cell, on a device of so many blocks.
LOADS = {"in turn": SMALL, "pressed": SMALL, "aborted": DEVICE, "shrunk": DEVICE}


def tokens(served: dict[str, Any]) -> list[Any]:
    return [one.get("tokens") for one in served["rounds"]]


@pytest.mark.parametrize("offload", ["eager", "lazy"])
class TestLoads:
    """Requests that are evicted, preempted and aborted, and memory that is taken away."""

    @pytest.fixture(params=ascend.RELEASES)
    def engines(self, request, folder, offload):
        """Return what engines on static and on elastic memory served."""

        def both(load: str) -> tuple[dict[str, Any], dict[str, Any]]:
            static, elastic = (
                npu.served(request.param, folder, offload, kvpatch, load, LOADS[load])
                for kvpatch in ("0", "1")
            )
            assert elastic["patches"]
            return static, elastic

        return both

    def test_what_was_evicted_is_served_back(self, engines):
        static, elastic = engines("in turn")
        assert tokens(elastic) == tokens(static)
        assert tokens(static) == [static["expected"]] * 2
        first, again = elastic["rounds"]
        assert (first["cached"], again["cached"]) == ([0] * len(MANY), npu.EVICTED)
        assert again["emptied"]

    def test_preempted_requests_go_on(self, engines):
        static, elastic = engines("pressed")
        assert tokens(elastic) == tokens(static)
        *both, end = elastic["rounds"]
        assert end["preempted"] > 0
        assert [one["emptied"] for one in both] == [True, True]

    def test_aborted_requests_leave_nothing(self, engines):
        static, elastic = engines("aborted")
        assert tokens(elastic) == tokens(static)
        assert [one["emptied"] for one in elastic["rounds"]] == [True] * 3

    def test_a_lower_limit_is_kept_and_loses_nothing(self, engines):
        static, elastic = engines("shrunk")
        assert tokens(elastic) == tokens(static)
        half, whole, lowered, again = elastic["rounds"]
        assert half["limit"] * 2 == whole["limit"]
        assert lowered["limit"] == again["limit"] == half["limit"]
        assert 0 < half["used"] <= half["limit"] < whole["used"] <= whole["limit"]
        assert half["cached"] == [0] * len(MANY)
        assert whole["cached"] == lowered["cached"] == npu.EVICTED
        assert lowered["emptied"]  # which gives back what the lower limit takes
        assert 0 < again["used"] <= again["limit"]
        assert again["emptied"]


@pytest.mark.parametrize("release", ascend.RELEASES)
def test_two_engines_on_one_device(release, static, folder, tmp_path):
    def start(name: str) -> dict[str, Any]:
        return npu.engine(release, folder, tmp_path, name, "eager", "1")

    with ThreadPoolExecutor(2) as pool:
        for served in pool.map(start, ("one", "other")):
            assert all(one["tokens"] == static["expected"] for one in served["rounds"])
            assert [one["cached"] for one in served["rounds"]] == npu.SERVED_BACK
