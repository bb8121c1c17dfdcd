"""Doubles that several tests use."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

# What another user may have put in the place of a file, and the fault that is found with it.
SQUATS = {
    "link": (Path.symlink_to, "is a link instead of a file"),
    "fifo": (lambda path, other: os.mkfifo(path), "is a special file instead of a file"),
    "second name": (Path.hardlink_to, "has a second name (a hard link)"),
}


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


def module(monkeypatch, name, **content):
    """Put a module in its place, in packages that are made where there are none."""
    made = ModuleType(name)
    vars(made).update(content)
    package, _, last = name.rpartition(".")
    if package:
        if package not in sys.modules:
            module(monkeypatch, package)
        monkeypatch.setattr(sys.modules[package], last, made, raising=False)
    monkeypatch.setitem(sys.modules, name, made)
    return made
