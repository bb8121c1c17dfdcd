"""vLLM's own variables are there before kvcached's threads read the environment."""

import os

import pytest
from fakes import module

from kvpatch.patches.elastic_memory.environment import around_engine_core


@pytest.fixture
def envs(monkeypatch):
    """A ``vllm.envs`` with a variable that sets itself, behind one that cannot be read."""
    made = module(monkeypatch, "vllm.envs", environment_variables=["WRONG", "SETS_ITSELF"])

    def read(name):
        if name == "WRONG":
            raise ValueError("no such choice")
        return os.environ.setdefault(name, "a name of its own")

    made.__getattr__ = read
    monkeypatch.delenv("SETS_ITSELF", raising=False)
    return made


def test_what_vllm_sets_by_itself_is_set_first(envs, monkeypatch):
    seen = []

    def wrapped(config):
        seen.append(os.environ["SETS_ITSELF"])
        return config

    assert around_engine_core(wrapped, None, ("config",), {}) == "config"
    assert seen == ["a name of its own"]
    monkeypatch.delenv("SETS_ITSELF")
