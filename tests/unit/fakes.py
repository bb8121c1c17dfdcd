"""Doubles that several tests use."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn


def raising(error: BaseException | type[BaseException]) -> Callable[..., NoReturn]:
    """A function that takes anything and raises ``error``."""

    def fail(*args: object, **kwargs: object) -> NoReturn:
        raise error

    return fail


def transfer(name: str, **extra: Any) -> Any:
    """vLLM's ``KVTransferConfig`` of a connector, with what is extra for it."""
    return SimpleNamespace(
        kv_connector=name, kv_connector_module_path=None, kv_connector_extra_config=extra
    )
