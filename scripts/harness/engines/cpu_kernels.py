"""What vLLM's kernels for a CPU lack, in torch, for plain vLLM and kvpatch's engines alike."""

import itertools
from collections.abc import Sequence
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
    if arguments.get("mamba_cache_mode") and arguments.get("speculative_config"):
        follow_what_was_accepted()


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


def follow_what_was_accepted() -> None:
    """Let the layers of Mamba2 go on behind the drafts that were accepted.

    Of vLLM's kernels for a CPU the convolution takes no notice of them, nor of several tokens of a
    request, and the other one does not store the state behind the first of these.
    """
    from vllm.model_executor.layers.mamba import mamba_mixer2

    convolve, update = mamba_mixer2.causal_conv1d_update, mamba_mixer2.selective_state_update

    def each(states: Any, x: Any, *weights: Any, **more: Any) -> None:
        accepted, ends = more["num_accepted_tokens"], more["cu_seqlens"]
        if accepted is None:
            update(states, x, *weights, **more)
            return
        blocks, out = more["state_batch_indices"].tolist(), more["out"]
        out.copy_(scanned(states, x, weights, ends.tolist(), accepted.tolist(), blocks))

    def accepted(x: Any, states: Any, weight: Any, bias: Any, *activation: Any, **more: Any) -> Any:
        if more["num_accepted_tokens"] is None:
            return convolve(x, states, weight, bias, *activation, **more)
        return convolved(
            x,
            states,
            weight,
            bias,
            more["query_start_loc"].tolist(),
            more["num_accepted_tokens"].tolist(),
            more["conv_state_indices"][:, 0].tolist(),
        )

    mamba_mixer2.causal_conv1d_update = accepted
    mamba_mixer2.selective_state_update = each


def convolved(
    x: Any,
    states: Any,
    weight: Any,
    bias: Any,
    ends: Sequence[int],
    accepted: Sequence[int],
    blocks: Sequence[int],
) -> Any:
    """Return a causal convolution of each request's tokens, with SiLU.

    Args:
        x: ``[tokens, channels]``, request by request.
        states: ``[blocks, channels, taps - 1 + drafts]``: the last tokens before, and those of the
            last step but its first. Those of this step are written to it.
        weight: ``[channels, taps]``.
        bias: ``[channels]``.
        ends: where the tokens of each request begin, and end.
        accepted: tokens of its last step that count.
        blocks: the block of its state.
    """
    import torch

    out, before = torch.empty_like(x), weight.shape[1] - 1
    for (begin, end), count, block in zip(itertools.pairwise(ends), accepted, blocks, strict=False):
        state = states[block]
        seen = torch.cat([state[:, count - 1 : count - 1 + before], x[begin:end].T], dim=-1)
        done = torch.nn.functional.conv1d(
            seen.to(weight.dtype), weight.unsqueeze(1), bias, groups=len(weight)
        )
        out[begin:end] = torch.nn.functional.silu(done).T
        state[:, : seen.shape[1] - 1] = seen[:, 1:]
    return out


def scanned(
    states: Any,
    x: Any,
    weights: Sequence[Any],
    ends: Sequence[int],
    accepted: Sequence[int],
    blocks: Sequence[Sequence[int]],
) -> Any:
    """Return what the states of Mamba2 give for each token, and store the state behind each.

    Args:
        states: ``[blocks, heads, size, n]``.
        x: ``[tokens, heads, size]``, request by request.
        weights: ``dt``, like x; A, ``[heads, size, n]``; B and C, ``[tokens, groups, n]``; D and
            the bias of ``dt``, ``[heads, size]``.
        ends: where the tokens of each request begin, and end.
        accepted: tokens of its last step that count.
        blocks: of each request those of the states behind its tokens.
    """
    import torch

    dt, a, b, c, d, bias = weights
    out = torch.empty_like(x)
    for (begin, end), count, row in zip(itertools.pairwise(ends), accepted, blocks, strict=False):
        state = states[row[count - 1]].float()
        for token, block in zip(range(begin, end), row, strict=False):
            step = torch.nn.functional.softplus(dt[token].float() + bias)
            into, from_ = (
                one[token].float().repeat_interleave(len(a) // one.shape[1], 0).unsqueeze(1)
                for one in (b, c)
            )
            state = state * torch.exp(step.unsqueeze(-1) * a)
            state = state + (step * x[token]).unsqueeze(-1) * into
            states[block] = state.to(states.dtype)
            out[token] = (state * from_).sum(-1) + d * x[token]
    return out


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
