"""Which process says that it is a frontend: one whose engine runs in another process."""

from types import SimpleNamespace

import pytest
from fakes import module

from kvpatch.patches.elastic_memory import configuration


@pytest.mark.parametrize(
    ("multiprocessing", "said", "roles", "announced"),
    [
        (True, False, [], True),
        (True, False, ["frontend"], True),
        (True, True, ["frontend"], True),  # another configuration of the same frontend
        (True, True, ["engine-core"], False),
        (True, False, ["engine-core"], True),  # what was inherited from another process
        (False, False, [], False),
        (False, True, ["frontend"], False),
    ],
)
def test_a_frontend_says_so(monkeypatch, multiprocessing, said, roles, announced):
    envs = SimpleNamespace(VLLM_ENABLE_V1_MULTIPROCESSING=multiprocessing)
    module(monkeypatch, "vllm", envs=envs)
    lines = []
    record = SimpleNamespace(roles=list(roles), said_here=lambda: said)
    record.say = lambda: lines.append(list(record.roles))
    monkeypatch.setattr(configuration, "record", record)
    configuration.announce_frontend()
    assert lines == ([["frontend"]] if announced else [])
    assert record.roles == (["frontend"] if announced else roles)
