"""Patches that do nothing unless secondary tiers are configured, which recorded runs rely on."""

from types import SimpleNamespace

import pytest
from fakes import transfer

from kvpatch import patches, state
from kvpatch.patch import WITH_SLEEP, WITH_TIERS, load
from kvpatch.patches.fence.hooks import Fenced
from kvpatch.patches.secondary_tiers import fingerprint
from kvpatch.telemetry.counters import Totals

# What vLLM imports for secondary tiers only.
OF_TIERS = ("vllm.v1.kv_offload.tiering.", "vllm.v1.kv_offload.file_mapper:")
EVERY = [one for feature in patches.FEATURES for one in feature.patches]
ROWS = [one for one in EVERY if one.only_with == WITH_TIERS]
CALLED = {one.id: one.wrapper for one in ROWS if not one.target.startswith(OF_TIERS)}


class Core(SimpleNamespace):
    """An engine core, a planner and what they have without tiers."""

    def __init__(self):
        request = SimpleNamespace(request_id="1", num_preemptions=0)
        status = SimpleNamespace(req_context=SimpleNamespace())
        super().__init__(
            vllm_config=SimpleNamespace(
                kv_transfer_config=transfer("OffloadingConnector", cpu_bytes_to_use=1 << 30)
            ),
            model_executor=SimpleNamespace(),  # asked nothing
            manager=SimpleNamespace(),
            _req_status={"1": status},
            request=request,
        )


ARGUMENTS = {
    "secondary_tiers.describe": lambda core: (core.vllm_config,),
    "secondary_tiers.reset": lambda core: (None,),
    "secondary_tiers.disk_hits": lambda core: (core.request, None, 64),
}


def test_it_is_known_which_are_called_without_tiers():
    assert set(CALLED) == set(ARGUMENTS)
    assert {one.only_with for one in EVERY} == {WITH_TIERS, WITH_SLEEP, ""}
    assert len(ROWS) > len(CALLED)


@pytest.mark.parametrize("row", CALLED)
def test_without_tiers_a_patch_returns_what_it_wraps_and_changes_nothing(monkeypatch, row):
    monkeypatch.setattr(fingerprint, "_digest", None)  # would not be called
    core, totals = Core(), Totals()
    state.attach(core, totals)
    state.attach(core, Fenced(SimpleNamespace(transfers={1: None}), None, None))
    args = ARGUMENTS[row](core)
    calls = []

    def wrapped(*given, **named):
        calls.append((given, named))
        return "result"

    assert load(CALLED[row])(wrapped, core, args, {}) == "result"
    assert calls == [(args, {})]
    assert totals.from_disk == 0
