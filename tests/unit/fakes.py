"""Doubles that several tests use."""

from types import SimpleNamespace


def raising(error):
    """A function that takes anything and raises ``error``."""

    def fail(*args, **kwargs):
        raise error

    return fail


def transfer(name, **extra):
    """vLLM's ``KVTransferConfig`` of a connector, with what is extra for it."""
    return SimpleNamespace(
        kv_connector=name, kv_connector_module_path=None, kv_connector_extra_config=extra
    )
