"""The secondary tier ``obj`` against a server that speaks S3, over NIXL, on real engines."""

from dataclasses import replace

import pytest

from harness.engines import bucket as buckets
from harness.engines.oracle import PLAIN
from harness.engines.runs import Run
from harness.engines.tiers import (
    FEW,
    SAME_HASHES,
    SMALL,
    assert_comes_back,
    assert_found,
)

SUFFIX = ".seal"


@pytest.fixture
def bucket(tmp_path):
    with buckets.bucket(tmp_path / "server") as one:
        yield one


@pytest.fixture
def on():
    def on(*places: str, **more: object) -> Run:
        nixl = {"PYTHONPATH": str(buckets.installed("nixl")), "NIXL_LOG_LEVEL": "WARN"}
        return Run(tiers=places, cpu_blocks=FEW, **more).within(SAME_HASHES | nixl)

    return on


@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "non-contiguous"])
@pytest.mark.parametrize("model", ["llama", "sliding"])
def test_prompts_that_device_and_host_lost_come_back_from_a_bucket(
    serve,
    engine,
    bucket,
    on,
    model,
    contiguous,
):
    run = on(bucket.url, model=model, contiguous=contiguous)
    finished = serve(run, times=2, watch=True, engine=SMALL[model])
    assert_comes_back(finished, engine(replace(PLAIN, model=model)))


def test_another_engine_is_served_and_one_of_another_layout_is_not(serve, engine, bucket, on):
    serve(on(bucket.url))
    assert_found(serve(on(bucket.url)), engine(PLAIN))
    assert_found(serve(on(bucket.url, contiguous=False)), engine(PLAIN), 0)


@pytest.mark.parametrize("kind", [".bin", SUFFIX])
def test_objects_that_are_not_what_was_stored_are_computed_again(serve, engine, bucket, on, kind):
    serve(on(bucket.url))
    for name in bucket.names():
        if name.endswith(kind):
            whole = bucket.ask("GET", name)
            bucket.ask("PUT", name, bytes([whole[0] ^ 1]) + whole[1:])
    assert_found(serve(on(bucket.url)), engine(PLAIN), 0)


def test_a_bucket_that_is_gone_is_a_miss(serve, engine, bucket, on, tmp_path):
    """A folder before it in the cascade goes on."""
    run = on(str(tmp_path / "folder"), bucket.url)
    serve(run)
    (name, *_) = bucket.names()
    assert bucket.ask("GET", name)
    assert_found(serve(run), engine(PLAIN))
