"""Doubles that several tests use."""

import sys
from types import ModuleType, SimpleNamespace

from kvpatch.versions import Facts, Installed


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
