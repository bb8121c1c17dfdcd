"""A pipeline starts with stages of the same layers only."""

from types import SimpleNamespace

import pytest
from fakes import namespace

from kvpatch.patches.elastic_memory import stages
from kvpatch.refusal import Refusal

MIB = 1 << 20


def config(*sizes):
    return SimpleNamespace(kv_cache_tensors=[SimpleNamespace(size=size * MIB) for size in sizes])


def planned(*configs, stages_of=2, ranks=1):
    engine = namespace(
        parallel_config__pipeline_parallel_size=stages_of,
        parallel_config__tensor_parallel_size=ranks,
    )
    made = [*configs]
    for args, kwargs in (((engine,), {}), ((), {"vllm_config": engine})):
        assert stages.around_kv_cache_configs(lambda *_, **__: made, None, args, kwargs) is made


def test_stages_of_the_same_layers_start():
    planned(config(8, 8), config(8, 8))
    planned(*[config(8, 8)] * 4, ranks=2)
    planned(config(8, 8), stages_of=1)


@pytest.mark.parametrize("last", [config(8), config(8, 4), config(16)])
def test_stages_of_other_layers_are_refused(last):
    with pytest.raises(Refusal, match="KVP428"):
        planned(config(8, 8), last)


def test_the_refusal_names_each_stage_once():
    with pytest.raises(Refusal, match="have KV caches of 16 MiB and 24 MiB, because"):
        planned(config(8, 8), config(8, 8), config(8, 8, 8), config(8, 8, 8), ranks=2)
