"""An engine in this process: how it is made for a job, and what every driver reads of it."""

import os
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM

from harness.engines.drafts import Drafts
from harness.engines.inside import come_to_rest, tell, tiers_behind
from harness.engines.placement import fork_workers
from harness.engines.prompting import runner_of
from harness.engines.scheduling import allow_async_scheduling, copy_outputs_without_streams
from kvpatch.patches.debug import audit
from kvpatch.upstream import connectors


class Engine:
    """The engine of a job, for which ``prepare`` has been called.

    Attributes:
        ranks: of its workers.
        planner: the scheduler's side of its OffloadingConnector; None if it has none.
        pool: of the device's blocks.
        drafts: of an engine that drafts; None of others.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        asynchronous = job["engine"].get("async_scheduling", False)
        if asynchronous:
            allow_async_scheduling()
        fork_workers()
        self.llm = LLM(job["model"], **job["engine"])
        tell("started")
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.ranks = int(self.core.vllm_config.parallel_config.world_size)
        if asynchronous and self.ranks == 1:  # several have Runner V2, which needs nothing
            copy_outputs_without_streams(self.core)
        self.scheduler = self.core.scheduler
        self.planner = connectors.scheduler_of(self.scheduler.connector)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        drafting = "speculative_config" in job["engine"]
        self.drafts = Drafts(self.scheduler) if drafting else None

    def ran(self) -> dict[str, Any]:
        """How it ran."""
        config = self.core.vllm_config
        return {
            "layout": getattr(config.cache_config, "kv_cache_layout", None),
            "runner": runner_of(config),
            "groups": len(self.scheduler.kv_cache_config.kv_cache_groups),
            "async": self.core.batch_queue is not None,
        }

    def rest(self, with_tiers: bool = False) -> None:
        """Step until its copies have ended, also those to the tiers behind the CPU tier."""
        tiers = tiers_behind(self.planner) if with_tiers else ()
        come_to_rest(self.scheduler, self.llm.llm_engine.step, tiers)

    def checked(self) -> list[Any]:
        """What debug mode has checked in each worker; nothing without it or a connector."""
        audited = audit.wanted() and self.core.vllm_config.kv_transfer_config is not None
        return list(self.llm.collective_rpc(audit.checked)) if audited else []
