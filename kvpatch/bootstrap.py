"""Switching on: from ``import kvpatch`` to the moment somebody imports vllm.

Only what an interpreter has loaded anyway is imported here, because this runs in
every Python process that has ``KVPATCH`` set, most of which never import vllm.
"""

from __future__ import annotations

import os
import sys

from kvpatch.environ import OFF_VALUES, SWITCH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_finder: VllmFinder | None = None
switched_on_by_import = False  # and not by the environment, which is set to follow


class VllmFinder:
    """Puts kvpatch's activation around the first import of vllm."""

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find vllm as the others would, with a loader that activates kvpatch.

        Finding must not fail: programs that never import vllm ask whether it is there.
        """
        if name != "vllm" or _switched_off():
            return None
        spec = self._ask_the_others(name, path, target)
        if spec is None:
            from kvpatch import refusal_report

            refusal_report.vllm_is_missing()
        elif spec.loader is not None:  # else a folder that happens to be called vllm
            spec.loader = _ActivatingLoader(spec.loader)  # type: ignore[assignment]
        return spec

    def _ask_the_others(self, name: str, path: Any, target: ModuleType | None) -> ModuleSpec | None:
        # One of them may ask us in turn, as wrapt's does: our loader is then around
        # vllm's own and around wrapt's, and activates in the inner one.
        for finder in list(sys.meta_path):
            if finder is not self:
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None


class _ActivatingLoader:
    """vllm's own loader, with kvpatch's gates before it and the patches after it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        _activation().before_vllm()
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # What is asked of a loader later, like its resources, is asked of vllm's own.
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _activation().after_vllm(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _activation() -> Any:
    """Import the rest of kvpatch; a refusal of vllm when that is broken.

    Raises:
        RefusedImport: a part of kvpatch, or wrapt or packaging, cannot be imported.
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
    return SWITCH.read() == "0"


def switch_on() -> None:
    """Arrange for the patches to be applied when vllm is imported.

    Called by ``import kvpatch``. ``KVPATCH=0`` wins over the import. A value that
    means nothing is not reported here: only vllm may be stopped by it.

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
            "to leave vllm as it is"
        )
    if SWITCH.read() in OFF_VALUES:
        switched_on_by_import = True
        os.environ[SWITCH.name] = "1"  # children started by this process follow
    _finder = VllmFinder()
    sys.meta_path.insert(0, _finder)
