"""What is kept on objects of vLLM: one attribute, and one object of ours for each class."""

import ast
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

from kvpatch import state

ROOT = Path(__file__).parents[2]


@dataclass
class Count:
    number: int = 0


@dataclass
class Names:
    names: list[str] = field(default_factory=list)


class Derived(Count):
    """A class of its own: what is kept for ``Count`` is another object."""


def test_what_was_attached_is_found_by_its_class():
    host = SimpleNamespace()
    assert state.find(None, Count) is state.find(host, Count) is None
    assert vars(host) == {}  # asking leaves nothing behind
    count = state.attach(host, Count(3))
    names = state.attach(host, Names(["a"]))
    assert state.find(host, Count) is count
    assert state.find(host, Names) is names
    assert state.find(host, Derived) is None
    assert list(vars(host)) == [state.ATTRIBUTE]
    # It travels with its host to another process.
    assert state.find(pickle.loads(pickle.dumps(host)), Count) == Count(3)
    later = state.attach(host, Count(2))
    assert state.find(host, Count) is later


def test_of_makes_it_once():
    host = SimpleNamespace()
    made = state.of(host, Count)
    made.number += 1
    assert state.of(host, Count) is made
    assert state.of(host, Count).number == 1


class Host:
    """A class of vLLM's; ours is on its objects."""


def test_two_hosts_share_nothing_unless_one_object_is_attached_to_both():
    one, other = Host(), Host()
    state.of(one, Count).number = 5
    assert state.find(other, Count) is None
    assert state.ATTRIBUTE not in vars(Host)
    assert state.of(other, Count).number == 0
    shared = state.attach(other, state.of(one, Count))
    assert state.find(one, Count) is state.find(other, Count) is shared


def test_nothing_of_ours_is_on_vllms_objects_by_any_other_name():
    """No module sets or reads an attribute ``kvpatch_...``."""
    found = []
    for path in sorted((ROOT / "kvpatch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("kvpatch"):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.attr}")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "getattr"):
                name = node.args[1]
                if isinstance(name, ast.Constant) and str(name.value).startswith("kvpatch"):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {name.value}")
    # Of kvcached's extension, and the name of our operators in torch.ops.
    symbols = ("kvpatch", "kvpatch_host_on_synchronize", "kvpatch_npu")
    assert [one for one in found if not one.endswith(symbols)] == []
