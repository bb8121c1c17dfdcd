"""The harness' sparse attention, over blocks that lie apart, against the formula."""

from types import SimpleNamespace

import pytest
import torch

from harness.engines import sparse_attention
from harness.engines.sparse_attention import DS_MLA, TILE, Attention, Metadata, packed, unpacked

BLOCKS, LAYERS, TOKENS, HEADS, CHOSEN, LENGTH = 6, 3, 4, 2, 3, 9
RANK, ROPE = 4 * TILE, 64
TABLE = torch.tensor([[4, 1, 3]])
SLOTS = TABLE[0, torch.arange(LENGTH) // TOKENS] * TOKENS + torch.arange(LENGTH) % TOKENS


def step():
    """A prompt of one request, whole."""
    return Metadata(SLOTS, TABLE, [(0, LENGTH, LENGTH)], 1, LENGTH, LENGTH)


def layer_of_many(*shape, dtype=torch.float32):
    """A layer's cache whose blocks have other layers between them."""
    return torch.zeros(BLOCKS, LAYERS, TOKENS, *shape, dtype=dtype)[:, 1]


def test_what_is_packed_comes_back_with_its_scale():
    torch.manual_seed(0)
    values = torch.randn(5, 2 * TILE) * torch.tensor([1e-3, 1, 1e3, 1e6, 0])[:, None]
    rows = packed(values)
    assert rows.shape == (5, 2 * TILE + 2 * 4)
    torch.testing.assert_close(unpacked(rows, 2 * TILE), values, rtol=0.07, atol=1e-3)


def test_a_token_attends_to_the_best_before_it(monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(LENGTH, HEADS, TILE), torch.randn(LENGTH, TILE)
    weights = torch.rand(LENGTH, HEADS)
    indexer = SimpleNamespace(
        topk_indices_buffer=torch.zeros(LENGTH, CHOSEN, dtype=torch.int32),
        topk_tokens=CHOSEN,
        head_dim=TILE,
        k_cache=SimpleNamespace(prefix="keys", kv_cache=layer_of_many(TILE + 4, dtype=torch.uint8)),
    )
    context = SimpleNamespace(attn_metadata={"keys": step()})
    monkeypatch.setattr(sparse_attention, "get_forward_context", lambda: context)
    chosen = sparse_attention.choose(indexer, None, q, k, weights)
    keys = unpacked(packed(k), TILE)
    for token in range(LENGTH):
        scores = (torch.relu(q[token] @ keys[: token + 1].T) * weights[token][:, None]).sum(0)
        best = scores.topk(min(CHOSEN, token + 1)).indices
        assert set(chosen[token].tolist()) - {-1} == set(best.tolist())


@pytest.mark.parametrize("dtype", ["auto", DS_MLA])
def test_only_the_chosen_are_attended_to(dtype):
    torch.manual_seed(0)
    latents, rope = torch.randn(LENGTH, RANK), torch.randn(LENGTH, 1, ROPE)
    q, buffer = torch.randn(LENGTH, HEADS, RANK + ROPE), torch.full((LENGTH, CHOSEN), -1)
    given = {"kv_lora_rank": RANK, "kv_cache_dtype": dtype, "topk_indices_buffer": buffer}
    attention = Attention(HEADS, RANK + ROPE, 0.1, **given)
    row = RANK + ROPE if dtype == "auto" else 656
    cache = layer_of_many(row, dtype=torch.float32 if dtype == "auto" else torch.uint8)
    attention.do_kv_cache_update(latents, rope, cache, SLOTS, dtype, None)
    for token in range(LENGTH):
        for at, one in enumerate({token, token // 2, 0}):
            buffer[token, at] = one
    found, _ = attention.forward_mqa(q, cache, step(), None)
    if dtype == DS_MLA:
        latents, rope = unpacked(packed(latents), RANK), rope.bfloat16().float()
    keys = torch.cat([latents, rope.squeeze(1)], dim=-1)
    for token in range(LENGTH):
        seen = sorted({token, token // 2, 0})
        scores = torch.softmax(q[token] @ keys[seen].T * 0.1, dim=-1)
        torch.testing.assert_close(found[token], scores @ latents[seen])
