"""The compiler that Triton asks every backend for; the interpreter never calls it."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):  # type: ignore[misc]
    """Compiles nothing."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """No target is compiled for."""
        return False

    def hash(self) -> str:
        """Key of nothing in a cache of compiled kernels."""
        return "kvpatch-interpreter"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        """Raise: compiling was asked for."""
        raise NotImplementedError("kernels run in Triton's interpreter on this machine")

    def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> NoReturn:
        """Raise: compiling was asked for."""
        raise NotImplementedError("kernels run in Triton's interpreter on this machine")

    def load_dialects(self, context: Any) -> None:
        """There are none."""

    def get_module_map(self) -> dict[str, Any]:
        """There are none."""
        return {}
