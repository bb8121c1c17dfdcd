"""The suites of the lane, and what of them does not run here, with the reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field

UNIT = "tests/v1/kv_connector/unit"
ENGINES = "starts engines of models from the hub"
RAY = "of NixlConnector, which kvpatch refuses; and imports Ray"


@dataclass(frozen=True)
class Suite:
    """Tests that run in one process.

    Attributes:
        name: in docs/upstream.md.
        source: ``vllm`` or ``kvcached``.
        folder: of that source, in which pytest runs.
        tests: below it.
        part: the plug-in of the run with kvpatch.
        beside: whether kvcached is on in both runs, and the plug-in too.
        left_out: files that do not run, or patterns of tests, and why.
    """

    name: str
    source: str
    folder: str
    tests: tuple[str, ...]
    part: str
    beside: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)


def _vllm(name: str, tests: str, **left_out: str) -> Suite:
    named = {f"{tests}/{file}": why for file, why in left_out.items()}
    return Suite(name, "vllm", "", (tests,), "harness.upstream.engine_part", left_out=named)


SUITES = (
    _vllm("kv_offload", "tests/v1/kv_offload"),
    _vllm("simple_kv_offload", "tests/v1/simple_kv_offload"),
    _vllm(
        "kv_connector",
        UNIT,
        **{
            "test_nixl_connector.py": RAY,
            "test_bidirectional_kv_transfer.py": RAY,
            "test_multi_connector.py::test_multi_example_connector_consistency": ENGINES,
            "test_offloading_connector.py": ENGINES,
        },
    ),
    _vllm(
        "core",
        "tests/v1/core",
        **{"test_scheduler_e2e.py": ENGINES, "test_reset_prefix_cache_e2e.py": ENGINES},
    ),
    Suite(
        "kvcached",
        "kvcached",
        "tests",
        (".",),
        "harness.upstream.kvcached_part",
        True,
        {
            "test_elastic_serving.py": "starts servers on a GPU",
            "test_offline_serving.py": "starts engines on a GPU",
            "test_traffic_monitor.py": "of a server that is running",
        },
    ),
)
