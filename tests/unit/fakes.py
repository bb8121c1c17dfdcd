"""Doubles that several tests use."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

from kvpatch.versions import Facts, Installed

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


def facts(vllm="0.28.0", device="cuda", contiguous=True, environment=None, memory=None):
    """A machine with a release of vLLM, and kvcached 0.1.6."""
    installed = Installed.release("vllm", vllm), Installed.release("kvcached", "0.1.6")
    return Facts(*installed, environment or {}, device, contiguous, lambda: memory)


class OffloadingConnector(SimpleNamespace):
    """vLLM's, by its name; its scheduler side is ``connector_scheduler``."""


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


def write(folder, files):
    """Write texts to paths in a folder."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def distribution(folder, name, version):
    """Make ``name`` look installed in ``version``, which may be None, without any files."""
    lines = ["Metadata-Version: 2.1", f"Name: {name}"]
    lines += [] if version is None else [f"Version: {version}"]
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    write(folder, {f"{info}/METADATA": "\n".join(lines) + "\n"})


def namespace(made=None, /, **leaves):
    """A namespace with attributes by their paths, of which ``__`` is the dot; or one with more."""
    made = SimpleNamespace() if made is None else made
    for path, value in leaves.items():
        *owners, name = path.split("__")
        owner = made
        for one in owners:
            owner = vars(owner).setdefault(one, SimpleNamespace())
        setattr(owner, name, value)
    return made


def planner(known, groups=3, windows=(1, 2), factor=1):
    """vLLM's scheduler side of OffloadingConnector.

    Args:
        known: the blocks that it knows of each request, in every group.
        groups: how many there are.
        windows: those of them with a sliding window.
        factor: blocks of a chunk, up to vLLM 0.22.
    """

    def states(ids):
        made = ({"block_ids": list(ids), "next_stored_block_idx": 1} for _ in range(groups))
        return SimpleNamespace(group_states=[SimpleNamespace(**one) for one in made])

    return SimpleNamespace(
        _sliding_window_groups=windows,
        _req_status={request: states(ids) for request, ids in known.items()},
        config=SimpleNamespace(
            block_size_factor=factor,
            kv_group_configs=[SimpleNamespace(group_idx=group) for group in range(groups)],
        ),
    )


def known(planner, request):
    """The blocks that a planner knows of a request, by group."""
    return [group.block_ids for group in planner._req_status[request].group_states]


def scheduler(held, groups=3):
    """vLLM's scheduler: of the blocks of each request, in every group, which are the null block."""

    def manager():
        blocks = {name: [SimpleNamespace(is_null=null) for null in held[name]] for name in held}
        return SimpleNamespace(req_to_blocks=blocks)

    coordinator = SimpleNamespace(single_type_managers=[manager() for _ in range(groups)])
    return SimpleNamespace(kv_cache_manager=SimpleNamespace(coordinator=coordinator))
