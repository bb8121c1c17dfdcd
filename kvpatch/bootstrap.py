"""Switching on: from ``import kvpatch`` to the moment somebody imports vllm.

Only the standard library is imported here, because this runs in every Python
process that has ``KVPATCH`` set, most of which never import vllm. The wait for
vllm is one entry on ``sys.meta_path`` that removes itself when it is asked.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

SWITCH = "KVPATCH"
OFF_VALUES = ("", "0")
ON_VALUES = ("1", "true", "on")

_finder: WaitForVllm | None = None


class WaitForVllm:
    """Runs kvpatch's activation around the first import of vllm."""

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Arm the activation and let the other finders find vllm.

        Registering happens now rather than at interpreter start because only
        now is ``sys.path`` complete, and because kvcached's own startup file
        has then certainly registered its hook before ours.
        """
        if name != "vllm":
            return None
        sys.meta_path.remove(self)
        from kvpatch import activation

        activation.arm()
        spec = importlib.util.find_spec(name)
        if spec is None:
            activation.vllm_not_found()
            sys.meta_path.insert(0, self)
        return spec


def _running_own_command() -> bool:
    """Whether this process is ``python -m kvpatch...``: a tool, not an engine."""
    arguments = sys.orig_argv
    module = next((b for a, b in zip(arguments, arguments[1:], strict=False) if a == "-m"), "")
    return module.partition(".")[0] == "kvpatch"


def switch_on() -> None:
    """Arrange for the patches to be applied when vllm is imported.

    Called by ``import kvpatch``. ``KVPATCH=0`` wins over the import. An
    unreadable value is not reported here: only vllm may be stopped by it.

    Raises:
        ImportError: vllm was imported before kvpatch in this process.
    """
    global _finder
    value = os.environ.get(SWITCH)
    if value is not None and value.strip() == "0":
        return
    if _finder is not None or _running_own_command():
        return
    if "vllm" in sys.modules:
        raise ImportError(
            "kvpatch was imported after vllm, when it can no longer patch it; "
            "import kvpatch first, or set KVPATCH=1 in the environment, or set KVPATCH=0 "
            "to leave vllm as it is"
        )
    if value is None or value.strip() in OFF_VALUES:
        os.environ[SWITCH] = "1"  # children started by this process follow
    _finder = WaitForVllm()
    sys.meta_path.insert(0, _finder)
