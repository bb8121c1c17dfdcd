"""Expert parallelism on a CPU, where vLLM's kernel takes every expert for one of the rank's own."""

from __future__ import annotations

from typing import Any


def keep_to_own_experts() -> None:
    """Let a rank compute those of a token's experts that it has.

    The kernel ``cpu_fused_moe`` is given no map of experts, and reads beyond the weights of a rank
    that has some of them. Here another rank's expert is the first one, times nothing.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    apply = cpu_moe.CPUUnquantizedExperts.apply

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        if (own_of := kwargs.get("expert_map")) is not None:
            own_ids = own_of[kwargs["topk_ids"].long()]
            is_own = own_ids >= 0
            kwargs |= {
                "topk_ids": own_ids.clamp(min=0).int(),
                "topk_weights": kwargs["topk_weights"] * is_own,
            }
        return apply(self, *args, **kwargs)

    cpu_moe.CPUUnquantizedExperts.apply = own
