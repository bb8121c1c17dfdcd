"""The operators of the emulated NPU beside torch's on the CPU; prints what was seen as JSON.

Runs in the environment ``ascend-0.23.0``.
"""

import ctypes
import json
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from vllm_ascend.utils import enable_custom_op

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 16, 8
_acl = ctypes.CDLL("libascendcl.so")
_HOST_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def same(made: Any, wanted: Any, tolerance: float = 1e-5) -> bool:
    close = torch.allclose(made.cpu().float(), wanted.float(), atol=tolerance)
    return made.device.type == "npu" and bool(close)


def of_torch() -> dict[str, bool]:
    """Compare torch's own operators: kinds of arguments and of results."""
    x, other = torch.randn(6, 8), torch.randn(8, 6)
    where = torch.tensor([4, 0])
    on, there = x.npu(), where.npu()
    written, in_place = on.clone(), on.clone()
    written[there] = 0
    in_place.add_(1).mul_(2)
    out = torch.empty(6, 6).npu()
    torch.mm(on, other.npu(), out=out)
    zeroed = x.clone()
    zeroed[where] = 0
    return {
        "a matrix product": same(on @ other.npu(), x @ other),
        "in place": same(in_place, (x + 1) * 2),
        "out": same(out, x @ other),
        "an index": same(on[there], x[where]),
        "written by an index": same(written, zeroed),
        "views": same(on.t()[::2, 1:], x.t()[::2, 1:]),
        "made contiguous": same(on.t().contiguous(), x.t()),
        "a list": same(torch.cat([on, on[:2]]), torch.cat([x, x[:2]])),
        "two results": same(torch.topk(on, 3).values, torch.topk(x, 3).values),
        "another type": same(on.to(torch.bfloat16), x.to(torch.bfloat16)),
        "made there": same(torch.arange(5, device="npu"), torch.arange(5)),
        "from a view of the host": same(torch.empty(8, 6).npu().copy_(x.t()), x.t()),
        "to a view of the host": torch.equal(torch.empty(8, 6).t().copy_(on), x),
        "a number": abs(on.sum().item() - x.sum().item()) < 1e-4,
    }


def dense(keys: Any, values: Any, queries: Any, first: int) -> Any:
    """Return torch's own attention of queries whose first is at ``first``."""
    mask = torch.arange(len(keys)) <= torch.arange(first, first + len(queries)).unsqueeze(1)
    made = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1),
        keys.transpose(0, 1),
        values.transpose(0, 1),
        attn_mask=mask,
        scale=0.3,
        enable_gqa=True,
    )
    return made.transpose(0, 1)


def of_a_model() -> dict[str, bool]:
    """Compare what a dense model takes from torch_npu, ATB and vllm-ascend."""
    x, residual, gamma = torch.randn(5, 32), torch.randn(5, 32), torch.randn(32)

    def norm(values: Any) -> Any:
        return values * torch.rsqrt(values.square().mean(-1, keepdim=True) + 1e-6) * gamma

    made, _, total = torch.ops._C_ascend.npu_add_rms_norm_bias(
        x.npu(), residual.npu(), gamma.npu(), None, 1e-6
    )
    seen = {
        "rms norm": same(torch_npu.npu_rms_norm(x.npu(), gamma.npu(), 1e-6)[0], norm(x)),
        "added rms norm": same(made, norm(x + residual)) and same(total, x + residual),
        "swiglu": same(
            torch_npu.npu_swiglu(x.npu()), torch.nn.functional.silu(x[:, :16]) * x[:, 16:]
        ),
    }
    angles = torch.randn(100, SIZE // 2)
    turns = torch.cat([angles.cos(), angles.sin()], -1)
    places = torch.tensor([3, 70, 9])
    query, key = torch.randn(3, HEADS * SIZE), torch.randn(3, KV_HEADS * SIZE)
    wanted = []
    for one in (query, key):
        pairs = torch.complex(*one.view(3, -1, 2, SIZE // 2).unbind(2))
        turned = pairs * torch.polar(torch.ones_like(angles), angles)[places].unsqueeze(1)
        wanted.append(torch.cat([turned.real, turned.imag], -1).reshape(3, -1))
    given = query.npu(), key.npu()
    torch_npu._npu_rotary_embedding(places.npu(), *given, SIZE, turns.npu(), True)
    seen["rotary embedding"] = all(map(same, given, wanted))

    lengths, tokens = (11, 3), (4, 3)  # a sequence with a cached prefix, and one without
    blocks = torch.tensor([[5, 2], [7, 0]])
    keys, values = torch.randn(2, 11, KV_HEADS, SIZE), torch.randn(2, 11, KV_HEADS, SIZE)
    cache = [torch.zeros(9, BLOCK, KV_HEADS, SIZE).npu() for _ in range(2)]
    for sequence, length in enumerate(lengths):
        at = torch.arange(length)
        slots = blocks[sequence][at // BLOCK] * BLOCK + at % BLOCK
        padded = [torch.cat([one[sequence, :length], one[sequence, :1]]) for one in (keys, values)]
        torch_npu._npu_reshape_and_cache(
            *(one.npu() for one in padded), *cache, torch.cat([slots, torch.tensor([-1])]).npu()
        )
    seen["cached"] = same(cache[0][7, :3], keys[1, :3]) and same(cache[1][2, :3], values[0, 8:])
    seen["nothing else cached"] = int((cache[0].cpu() != 0).any(-1).any(-1).sum()) == sum(lengths)
    queries = torch.randn(sum(tokens), HEADS, SIZE)
    ends = [tokens[0], sum(tokens)]
    made, _ = torch_npu.npu_fused_infer_attention_score(
        query=queries.npu(),
        key=cache[0].view(9, BLOCK, -1),
        value=cache[1].view(9, BLOCK, -1),
        atten_mask=torch.ones(1).npu(),
        block_table=blocks.npu(),
        block_size=BLOCK,
        input_layout="TND",
        actual_seq_lengths=ends,
        actual_seq_lengths_kv=list(lengths),
        num_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        scale=0.3,
        sparse_mode=3,
    )
    wanted = [
        dense(keys[one, :length], values[one, :length], part, length - len(part))
        for one, (length, part) in enumerate(zip(lengths, queries.split(tokens), strict=True))
    ]
    seen["attention"] = same(made, torch.cat(wanted))
    return seen


def in_order() -> dict[str, bool]:
    """Compute while a stream is held: what waits for it waits, and no other."""
    source = torch.full((4,), 5.0).pin_memory()
    late, there = torch.zeros(4).npu(), torch.zeros(4).npu()
    torch.npu.synchronize()
    go, side = threading.Event(), torch.npu.Stream()
    hold = _HOST_CALL(lambda _: (go.wait(), None)[1])
    assert _acl.aclrtLaunchHostFunc(ctypes.c_void_p(side.npu_stream), hold, None) == 0
    with torch.npu.stream(side):
        late.copy_(source, non_blocking=True)
        loaded = torch.npu.Event()
        loaded.record()
    early = (late + 1).cpu().tolist()  # of another stream, which waits for nothing
    threading.Timer(0.2, go.set).start()
    torch.npu.current_stream().wait_event(loaded)
    there.copy_(late)
    return {"not ordered": early == [1.0] * 4, "ordered": there.cpu().tolist() == [5.0] * 4}


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
        torch.npu.synchronize()
    except (RuntimeError, NotImplementedError):
        return True
    return False


def main() -> None:
    """Run every comparison."""
    torch.manual_seed(3)
    torch.npu.set_device(0)
    assert enable_custom_op()
    x = torch.randn(2, 4).npu()
    attend = torch_npu.npu_fused_infer_attention_score
    lengths = {"actual_seq_lengths": [2], "actual_seq_lengths_kv": [2], "num_heads": 1}
    seen = {
        "torch": of_torch(),
        "model": of_a_model(),
        "order": in_order(),
        "refused": {
            "an operator that is not there": refused(lambda: torch_npu.npu_fast_gelu(x)),
            "the device's random numbers": refused(
                lambda: torch.randn(3, device="npu", generator=torch.Generator("npu"))
            ),
            "another layout": refused(lambda: attend(x, x, x, input_layout="BSH", **lengths)),
            "quantized keys": refused(
                lambda: attend(x, x, x, input_layout="TND", antiquant_scale=x, **lengths)
            ),
            "another mask": refused(
                lambda: attend(x, x, x, input_layout="TND", atten_mask=x, sparse_mode=0, **lengths)
            ),
        },
    }
    print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
