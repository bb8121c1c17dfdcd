"""Without ``KVPATCH_HOST_POOL`` nothing of the pool is imported or applied."""

import subprocess
import sys

import pytest

from kvpatch import gate
from kvpatch.environ import HOST_POOL
from kvpatch.patch import Outcome
from kvpatch.patches.host_pool import FEATURE, presence
from kvpatch.versions import Installed

CODE = """
import sys
from kvpatch import patches, rules
from kvpatch.patches.metrics import snapshot
rules.of(feature.rules for feature in patches.FEATURES)
print([name for name in sys.modules if name.startswith("kvpatch.pool")])
print([name for name in sys.modules if name.startswith("kvpatch.patches.host_pool.")])
"""


def test_the_rows_and_rules_import_nothing_of_it():
    said = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said[0] == "[]"
    assert said[1] == "['kvpatch.patches.host_pool.presence', 'kvpatch.patches.host_pool.rules']"


@pytest.mark.parametrize(("release", "outcome"), [("0.28.0", None), ("0.26.0", Outcome.OUTSIDE)])
def test_the_feature_is_applied_where_it_is_asked_for(monkeypatch, release, outcome):
    vllm = Installed.release("vllm", release)
    monkeypatch.delenv(HOST_POOL.name, raising=False)
    assert not presence.wanted()
    assert presence.size() == 0
    assert gate.check_feature(FEATURE, vllm).outcome is Outcome.NOT_NEEDED
    monkeypatch.setenv(HOST_POOL.name, "1GiB@a")
    assert presence.wanted()
    assert presence.size() == 1 << 30
    assert presence.home().name.endswith("-a")
    found = gate.check_feature(FEATURE, vllm, lambda target: lambda: ())
    assert found.outcome is (outcome or Outcome.MOVED)  # the fake has no parameters
    assert gate.refusal(FEATURE, gate.Verdict(Outcome.OUTSIDE)) is None  # rules refuse
