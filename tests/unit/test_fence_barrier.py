"""The wait for the workers before pages are unmapped: its limit, and who must have answered."""

from types import SimpleNamespace

import pytest
from fakes import module

from kvpatch.patches.fence import hooks


@pytest.fixture
def engine(monkeypatch):
    """An engine with a connector, whose fence is installed; its workers give ``answers``."""
    module(monkeypatch, "vllm", envs=SimpleNamespace(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=300))
    manager = SimpleNamespace()
    monkeypatch.setattr(hooks.kvcached_api, "manager_of", lambda engine: manager)
    monkeypatch.setattr(hooks.kvcached_api, "unmap_at_once", lambda manager: None)
    monkeypatch.setattr(hooks.connectors, "scheduler_of", lambda connector: None)
    made = SimpleNamespace(manager=manager, answers=[True, True], calls=[])

    def collective_rpc(method, timeout=None):
        made.calls.append((method, timeout))
        if isinstance(made.answers, Exception):
            raise made.answers
        return made.answers

    made.scheduler = SimpleNamespace(connector=object())
    made.model_executor = SimpleNamespace(collective_rpc=collective_rpc)
    made.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=2))
    hooks.around_install(lambda: None, made, (), {})
    return made


def test_the_workers_are_given_the_time_of_a_step(engine):
    engine.manager.physical_release_barrier()
    assert engine.calls == [(hooks.compute_barrier, 300)]


def test_a_worker_that_hangs_ends_the_wait(engine):
    engine.answers = TimeoutError("RPC call to compute_barrier timed out.")
    with pytest.raises(RuntimeError) as ended:
        engine.manager.physical_release_barrier()
    assert str(ended.value) == (
        "a worker did not finish its computation within 300 s "
        "(VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS); its pages cannot be unmapped"
    )


@pytest.mark.parametrize("answers", [[True], [True, False], [True, None], []])
def test_nothing_is_unmapped_unless_every_worker_has_answered(engine, answers):
    engine.answers = answers
    with pytest.raises(RuntimeError, match="2 workers had to finish before pages are unmapped"):
        engine.manager.physical_release_barrier()
