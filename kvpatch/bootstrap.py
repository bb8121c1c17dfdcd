"""Switching on: from ``import kvpatch`` to the first import of vllm.

Only modules that every interpreter has already loaded are imported here, because this
runs in every Python process that has ``KVPATCH`` set, most of which never import vllm.
"""

from __future__ import annotations

import os
import sys

from kvpatch.environ import SWITCH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_finder: VllmFinder | None = None
switched_on_by_import = False  # not by the environment, which is then set for child processes


class VllmFinder:
    """Wraps the first import of vllm with kvpatch's activation."""

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find vllm through the other finders, with a loader that activates kvpatch.

        Must not raise: programs that never import vllm look up whether it is installed.
        """
        if name != "vllm" or _switched_off():
            return None
        spec = self._ask_the_others(name, path, target)
        if spec is None:
            from kvpatch import refusal_report

            refusal_report.vllm_is_missing()
        elif spec.loader is not None:  # else a namespace package: any folder named vllm
            spec.loader = _ActivatingLoader(spec.loader)  # type: ignore[assignment]
        return spec

    def _ask_the_others(self, name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        # A finder may call this one in turn, as wrapt's does: the activating loader then
        # wraps both vllm's own and wrapt's, and activates in the inner one.
        for finder in list(sys.meta_path):
            # Python itself skips a finder without find_spec, as six's was before 1.16.
            find_spec = getattr(finder, "find_spec", None)
            if finder is not self and find_spec is not None:
                spec: ModuleSpec | None = find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


class _ActivatingLoader:
    """vllm's own loader, preceded by kvpatch's gates and followed by the patches."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        _activation().before_vllm()
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Later uses of the loader, such as its resources, go to vllm's own.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _activation().after_vllm(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _activation() -> Any:
    """Import the rest of kvpatch; refuse vllm if that fails.

    Raises:
        RefusedImport: a module of kvpatch, or wrapt or packaging, cannot be imported.
    """
    try:
        from kvpatch import activation
    except Exception as error:
        from kvpatch.refusal import RefusedImport
        from kvpatch.refusal_report import in_one_line

        in_one_line()
        raise RefusedImport(
            "kvpatch itself cannot be imported",
            f"it failed with {type(error).__name__}: {error}",
            f"reinstall kvpatch with its requirements, or set {SWITCH}=0",
            code="KVP108",
        ) from error
    return activation


def _switched_off() -> bool:
    """Whether the operator said so; an unset switch leaves it to the import."""
    return bool(SWITCH.read()) and SWITCH.is_off()


def switch_on() -> None:
    """Arrange for the patches to be applied when vllm is imported.

    Called by ``import kvpatch``. ``KVPATCH=0`` takes precedence over the import. An
    unknown value is not reported here, because it may stop only vllm.

    Raises:
        ImportError: vllm was imported before kvpatch in this process.
    """
    global _finder, switched_on_by_import
    if _switched_off() or _finder is not None:
        return
    if "vllm" in sys.modules:
        raise ImportError(
            "kvpatch was imported after vllm, when it can no longer patch it; "
            "import kvpatch first, or set KVPATCH=1 in the environment, or set KVPATCH=0 "
            "to leave vllm as it is. [KVP109]"
        )
    if not SWITCH.read():
        switched_on_by_import = True
        os.environ[SWITCH.name] = "1"  # inherited by child processes
    _finder = VllmFinder()
    sys.meta_path.insert(0, _finder)
