"""vLLM's KV offloading on kvcached's elastic KV memory.

Importing this package switches kvpatch on for the process and its children,
unless ``KVPATCH=0``; the startup file imports it when ``KVPATCH=1``. Nothing of
vllm, torch or kvcached is imported here: the patches are applied when vllm is imported.

``kvpatch.status()`` returns the processes that have kvpatch on; ``kvpatch.Refusal`` is what a
configuration raises that must not start. Both are imported when they are asked for.

Raises:
    ImportError: vllm was imported before kvpatch in this process.
"""

from kvpatch.bootstrap import switch_on as _switch_on
from kvpatch.version import VERSION

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from kvpatch.api import Process, status
    from kvpatch.refusal import Refusal

__all__ = ["Process", "Refusal", "__version__", "status"]
__version__ = VERSION

_HOMES = {"Process": "api", "Refusal": "refusal"}


def __getattr__(name: "str") -> "Any":
    from importlib import import_module

    if name == "status":
        return import_module("kvpatch.status")
    if name in _HOMES:
        return getattr(import_module(f"kvpatch.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'kvpatch' has no attribute {name!r}")


def __dir__() -> "list[str]":
    return sorted(__all__)


_switch_on()
