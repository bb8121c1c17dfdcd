"""``kvpatch verify`` on the host device: a combination that the tables call not validated.

It is refused, verified, and starts; a byte that is wrong is found; another flag asks again.
"""

import os

import pytest

from harness.engines import plugins
from harness.engines.operator import FLAGS, Machine, environment_of


@pytest.fixture(scope="module")
def machine(models, device, tmp_path_factory):
    environment = environment_of(device, tmp_path_factory.mktemp("home"))
    return Machine(models("llama"), environment, tmp_path_factory.mktemp("verify"), FLAGS)


def test_a_combination_is_refused_verified_and_starts(machine):
    found = machine.is_verified("KVP324")
    assert found["measured"]["pages given back"] > 0
    assert "[KVP324]" in machine.configure(**{"block-size": "64"})
    shown = machine.kvpatch("doctor").stdout
    assert "was right on " in shown
    assert "it lifts KVP324" in shown


def test_a_wrong_byte_is_found_and_lifts_nothing(machine, tmp_path, monkeypatch):
    folder = plugins.install(tmp_path, "flip_loaded_bits")
    path = os.pathsep.join([folder, machine.environment["PYTHONPATH"]])
    with monkeypatch.context() as changed:
        changed.setitem(machine.environment, "PYTHONPATH", path)  # also of what asks afterwards
        machine.find_the_wrong(folder, "KVP324")
    assert "; verified here on " in machine.configure()  # the plug-in was wrong
