"""The compiler that Triton requires of every backend; the interpreter never calls it."""

from __future__ import annotations

from typing import Any, NoReturn

from triton.backends.compiler import BaseBackend


class InterpretedBackend(BaseBackend):  # type: ignore[misc]
    """Compiles nothing."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Return False: no target is compiled for."""
        return False

    def hash(self) -> str:
        """Return a key for the cache of compiled kernels, which stays empty."""
        return "kvpatch-interpreter"

    def parse_options(self, options: dict[str, Any]) -> NoReturn:
        """Raise NotImplementedError: nothing is compiled."""
        raise NotImplementedError("kernels run in Triton's interpreter on this machine")

    def add_stages(self, stages: dict[str, Any], options: object, language: Any) -> NoReturn:
        """Raise NotImplementedError: nothing is compiled."""
        raise NotImplementedError("kernels run in Triton's interpreter on this machine")

    def load_dialects(self, context: Any) -> None:
        """Load no dialects."""

    def get_module_map(self) -> dict[str, Any]:
        """Return no modules."""
        return {}
