"""Keys of ``kv_connector_extra_config`` that vLLM ignores without a word: ``unread``."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from kvpatch.upstream.connectors import CPU_SPEC, OFFLOADING, SIMPLE, Leaf

_V1 = "distributed/kv_transfer/kv_connector/v1"
# Of a connector, what in vLLM reads its keys; of OffloadingConnector also what its spec reads.
_READERS = {
    OFFLOADING: (f"{_V1}/offloading*", "v1/kv_offload/*.py", "v1/kv_offload/cpu"),
    SIMPLE: (f"{_V1}/simple_cpu_offload_connector.py", "v1/simple_kv_offload"),
}
_TIERING = "v1/kv_offload"


def unread(leaf: Leaf) -> dict[str, str]:
    """Return the keys of a connector's extra config that no source of the installed vLLM names.

    Each has the key that it may have been meant for, or an empty string. There are none of
    connectors and specs that are not vLLM's own.
    """
    readers = _READERS.get(leaf.name)
    asked = [key for key in leaf.extra if key != "cpu_bytes_to_use"]  # which all of them read
    if not asked or readers is None or leaf.module or leaf.extra.get("spec_module_path"):
        return {}
    if leaf.name == OFFLOADING and leaf.spec != CPU_SPEC:
        readers = (*readers, _TIERING)
    named = set(re.findall(r"""["'](\w+)["']""", "".join(_sources(readers))))
    return {
        key: next(iter(get_close_matches(key, named, n=1, cutoff=0.8)), "")
        for key in asked
        if named and key not in named
    }


def _sources(readers: tuple[str, ...]) -> Iterator[str]:
    """Iterate over the sources that match ``readers``, which are relative to vLLM's package."""
    found = importlib.util.find_spec("vllm")
    for folder in (found.submodule_search_locations or ()) if found else ():
        for reader in readers:
            for path in Path(folder).glob(reader):
                for source in (path,) if path.is_file() else path.rglob("*.py"):
                    yield source.read_text("utf-8")  # whatever the locale
