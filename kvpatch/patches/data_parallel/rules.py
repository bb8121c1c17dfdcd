"""Where data parallelism starts: in the cells that ran, as they ran.

The ranks of a dense model are engines that know nothing of each other. Those of a mixture of
experts step together, with empty batches where a rank has no request, and none of them ran: on a
CPU vLLM itself does not (NotImplementedError in ``all_gatherv``, seen with 0.32.0 and 0.33.0). On
a GPU kvcached reads the free memory of the first device in the process of every engine, and the
worker of a later rank has another one.
"""

from __future__ import annotations

from typing import Any

from kvpatch import admitted
from kvpatch.environ import HOST_POOL, IDLE
from kvpatch.patches.offloading import place
from kvpatch.patches.offloading.dtype_rules import VALIDATED_CACHE_DTYPES
from kvpatch.rules import Rule
from kvpatch.versions import Facts

SIZES = (2, 4)
FEATURES = tuple(f"{size} engines" for size in SIZES)  # by the names of their cells
_HOW = (
    "on one machine without a GPU, of a dense model with one worker each and nothing else turned on"
)


def _refused(config: Any, facts: Facts) -> bool:
    size = config.parallel_config.data_parallel_size
    if size == 1:
        return False
    feature = f"{size} engines"
    return not (
        feature in FEATURES
        and _as_it_ran(config, facts)
        and place.starts_with(feature, config, facts)
    )


def _as_it_ran(config: Any, facts: Facts) -> bool:
    """Return whether engines are started as those of the cells are, which have nothing beside."""
    parallel, model, transfer = (
        config.parallel_config,
        config.model_config,
        config.kv_transfer_config,
    )
    here = getattr(parallel, "data_parallel_size_local", parallel.data_parallel_size)
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    return (
        facts.device == "cpu"
        and not getattr(model, "is_moe", False)
        and parallel.world_size == 1
        and here == parallel.data_parallel_size
        and getattr(parallel, "data_parallel_backend", "mp") == "mp"
        and config.speculative_config is None
        and config.cache_config.cache_dtype in VALIDATED_CACHE_DTYPES
        and not any(one.read(facts.environment) for one in (HOST_POOL, IDLE))
        # vLLM tells ranks apart by the connector's own engine_id, and not by those inside it.
        and not any("engine_id" in one for one in extra.get("connectors") or ())
    )


RULES = (
    Rule(
        "KVP374",
        "data parallelism" + admitted.but(*FEATURES, how=_HOW),
        _refused,
        lambda config, facts: (
            f"data parallelism over {config.parallel_config.data_parallel_size} engines is "
            "configured"
        ),
        admitted.why(*FEATURES, how=_HOW),
        "start each engine as a server of its own, without --data-parallel-size",
        with_connector=False,
    ),
)
