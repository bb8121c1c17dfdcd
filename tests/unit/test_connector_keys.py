"""Keys of a connector that vLLM ignores."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest

from kvpatch.upstream.connector_keys import unread
from kvpatch.upstream.connectors import OFFLOADING, SIMPLE, Leaf

TIERING = {"spec_name": "TieringOffloadingSpec"}


@pytest.fixture(autouse=True)
def vllm(tmp_path, monkeypatch):
    """A vLLM whose connectors read a few keys."""
    vllm = tmp_path / "vllm"
    v1 = vllm / "distributed/kv_transfer/kv_connector/v1"
    for path, key in [
        (v1 / "offloading_connector.py", "spec_name"),
        (v1 / "offloading/scheduler.py", "blocks_per_chunk"),
        (v1 / "simple_cpu_offload_connector.py", "lazy_offload"),
        (vllm / "v1/kv_offload/cpu/spec.py", "eviction_policy"),
        (vllm / "v1/kv_offload/tiering/spec.py", "secondary_tiers"),
    ]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"extra.get('{key}')  # \N{EM DASH}", "utf-8")
    (vllm / "__init__.py").touch()
    found = SimpleNamespace(submodule_search_locations=[str(vllm)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    return found


@pytest.mark.parametrize(
    ("name", "extra", "ignored"),
    [
        (OFFLOADING, {"cpu_bytes_to_use": 1, "blocks_per_chunk": 2, "eviction_policy": "arc"}, {}),
        (OFFLOADING, {"lazy_offload": True}, {"lazy_offload": ""}),
        (OFFLOADING, {"eviction_polic": "arc"}, {"eviction_polic": "eviction_policy"}),
        (OFFLOADING, {"secondary_tiers": []}, {"secondary_tiers": ""}),
        (OFFLOADING, {"secondary_tiers": []} | TIERING, {}),
        (SIMPLE, {"lazy_offload": True, "lazy_ofload": True}, {"lazy_ofload": "lazy_offload"}),
        (SIMPLE, {"eviction_policy": "arc"}, {"eviction_policy": ""}),
        ("NixlConnector", {"anything": 1}, {}),
        (OFFLOADING, {"spec_module_path": "mine", "anything": 1}, {}),
    ],
)
def test_those_that_no_source_of_it_names(name, extra, ignored):
    assert unread(Leaf(name, None, extra)) == ignored


def test_nothing_is_said_of_a_connector_by_path_or_without_sources(vllm):
    assert unread(Leaf(OFFLOADING, "mine", {"anything": 1})) == {}
    vllm.submodule_search_locations = ["/nowhere"]
    assert unread(Leaf(OFFLOADING, None, {"anything": 1})) == {}


def test_the_sources_are_read_as_utf8_whatever_the_locale(run, tmp_path):
    code = (
        f"from {unread.__module__} import *; print(unread(Leaf(OFFLOADING, None, {{'block': 1}})))"
    )
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run(sys.executable, "-c", code, PYTHONPATH=tmp_path, **ascii_only)
    assert done.out == "{'block': ''}\n", done.err
