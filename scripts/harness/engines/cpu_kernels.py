"""What vLLM's kernels for a CPU lack, in torch, for plain vLLM and kvpatch's engines alike."""

import itertools
from typing import Any

from packaging.version import Version

# From here on a step of Mamba2 layers keeps a state within it, for the prefix cache.
CHECKPOINTS = Version("0.32")


def install(arguments: dict[str, Any], release: Version) -> None:
    """Bring what an engine of these arguments of ``LLM`` needs."""
    if arguments.get("enable_expert_parallel"):
        keep_to_own_experts()
    if "index_topk" in arguments.get("hf_overrides", {}):
        from harness.engines import sparse_attention

        sparse_attention.install()
    if arguments.get("mamba_cache_mode") and release >= CHECKPOINTS:
        give_the_states_of_chunks()


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


def give_the_states_of_chunks() -> None:
    """Let the scan of Mamba2 return the state behind each chunk where it is asked for them.

    vLLM's own for a CPU returns those behind each sequence whatever it is asked for. The kernel
    that stores one of them is Triton's, which Runner V1 has not on a CPU.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2
    from vllm.model_executor.layers.mamba.ops import ssd_combined

    scan = ssd_combined._mamba_chunk_scan_combined_fwd

    def of_chunks(x: Any, dt: Any, a: Any, b: Any, c: Any, size: int, out: Any, **more: Any) -> Any:
        import torch

        if not more.pop("return_intermediate_states", False):
            return scan(x, dt, a, b, c, size, out, **more)
        initial, gate = more.pop("initial_states", None), more.pop("z", None)
        dtype = more.pop("state_dtype", None) or x.dtype
        ends, sequences = more["cu_chunk_seqlens"].tolist(), more["seq_idx"].tolist()
        states: list[Any] = []
        for number, (begin, end) in enumerate(itertools.pairwise(ends)):
            sequence = sequences[number]
            if number and sequences[number - 1] == sequence:
                before = states[-1]
            else:
                before = None if initial is None else initial[sequence : sequence + 1]
            part = slice(begin, end)
            done = out[part].contiguous()
            more["cu_seqlens"] = torch.tensor([0, end - begin], dtype=torch.int32)
            state = scan(
                *(x[part], dt[part], a, b[part], c[part], size, done),
                initial_states=before,
                z=None if gate is None else gate[part],
                state_dtype=torch.float32,
                **more,
            )
            states.append(state)
            out[part] = done
        return torch.cat(states).to(dtype)

    ssd_combined._mamba_chunk_scan_combined_fwd = of_chunks
    mamba_mixer2.store_prefill_checkpoint = store_checkpoint


def store_checkpoint(
    checkpoint: Any,
    chunks: Any,
    x: Any,
    conv_state: Any,
    chunk_states: Any,
    ssm_state: Any,
    starts: Any,
    *,
    state_len: int,
) -> None:
    """Store the state within each sequence that has one there, as vLLM's kernel of this name."""
    offsets, blocks = checkpoint.checkpoint_offsets.tolist(), checkpoint.state_indices.tolist()
    for row, (offset, block) in enumerate(zip(offsets, blocks, strict=True)):
        if offset > 0:
            end = int(starts[row]) + offset
            conv_state[block][:, :state_len] = x[:, end - state_len : end]
            ssm_state[block] = chunk_states[int(chunks[row])]
