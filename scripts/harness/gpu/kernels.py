"""The step ``kernels``: kernels that every answer needs, against torch in float32."""

import torch

from harness.gpu.seen import Job, Seen

APART = 2e-2  # of bfloat16, in the norm of the difference
Pair = tuple[torch.Tensor, torch.Tensor]
GROUP = 2  # query heads of a KV head


def run(job: Job, seen: Seen) -> None:
    """Compare every kernel; one that cannot be run is wrong."""
    import vllm._custom_ops  # noqa: F401 - loads the libraries

    for kernel in (rms_norm, silu_and_mul, cache_write, attention, block_copies):
        try:
            got, wanted = kernel()
            apart = float((got.float() - wanted.float()).norm() / wanted.float().norm())
            seen.check(kernel.__name__, apart < APART, f"{apart:.3g} apart")
        except Exception as error:
            lines = f"{type(error).__name__}: {error}".splitlines()
            seen.check(kernel.__name__, False, lines[0][:300])


def rms_norm() -> Pair:
    """Normalise rows."""
    given, weight = _random(64, 1024), _random(1024)
    got = torch.empty_like(given)
    torch.ops._C.rms_norm(got, given, weight, 1e-5)
    rows = given.float()
    return got, rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5) * weight.float()


def silu_and_mul() -> Pair:
    """Multiply halves of rows, one through SiLU."""
    given = _random(64, 2048)
    got = given.new_empty(64, 1024)
    torch.ops._C.silu_and_mul(got, given)
    gate, rest = given.float().chunk(2, -1)
    return got, torch.nn.functional.silu(gate) * rest


def cache_write() -> Pair:
    """Write keys of tokens into their slots of a paged cache."""
    keys, values = _random(32, 4, 64), _random(32, 4, 64)
    cache = torch.zeros(2, 8, 16, 4, 64, device="cuda", dtype=torch.bfloat16)
    slots, one = torch.randperm(128, device="cuda")[:32], torch.ones(1, device="cuda")
    torch.ops._C_cache_ops.reshape_and_cache_flash(
        keys, values, cache[0], cache[1], slots, "auto", one, one
    )
    return cache[0].view(128, 4, 64)[slots], keys


def attention() -> Pair:
    """Attend causally, by FlashAttention 3."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    tokens = 48
    query, key, value = _random(tokens, 8, 64), _random(tokens, 4, 64), _random(tokens, 4, 64)
    ends = torch.tensor([0, tokens], device="cuda", dtype=torch.int32)
    got = flash_attn_varlen_func(
        *(query, key, value),
        max_seqlen_q=tokens,
        cu_seqlens_q=ends,
        max_seqlen_k=tokens,
        cu_seqlens_k=ends,
        causal=True,
        fa_version=3,
    )
    heads = [query, *(one.repeat_interleave(GROUP, 1) for one in (key, value))]
    first = [one.float().transpose(0, 1)[None] for one in heads]
    wanted = torch.nn.functional.scaled_dot_product_attention(*first, is_causal=True)
    return got, wanted[0].transpose(0, 1)


def block_copies() -> Pair:
    """Copy blocks to pinned memory in another order, as vLLM's worker does."""
    from vllm import _custom_ops

    count, size = 64, 64 << 10
    device = torch.randint(0, 255, (count, size), device="cuda", dtype=torch.uint8)
    host = torch.zeros(count, size, dtype=torch.uint8, pin_memory=True)
    numbers = torch.arange(count, dtype=torch.int64)
    torch.cuda.synchronize()
    # The driver refuses a batch on the default stream.
    with torch.cuda.stream(torch.cuda.Stream()):
        _custom_ops.swap_blocks_batch(
            device.data_ptr() + numbers * size,
            host.data_ptr() + (count - 1 - numbers) * size,
            torch.full((count,), size, dtype=torch.int64),
        )
    torch.cuda.synchronize()
    return host.flip(0), device.cpu()


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
