"""The host device's latent attention, over blocks that lie apart, against the formula."""

from types import SimpleNamespace
from typing import Any

import torch

from kvpatch.hostdevice import latent_attention

RANK, ROPE, TOKENS, BLOCKS, LAYERS, HEADS = 8, 4, 4, 6, 3, 2
LENGTHS = (9, 5)
TABLE = torch.tensor([[4, 1, 3], [2, 5, 0]])


def layer_of_many() -> Any:
    """A layer's KV cache whose blocks have other layers between them: filled with noise."""
    torch.manual_seed(0)
    return torch.randn(BLOCKS, LAYERS, TOKENS, RANK + ROPE)[:, 1]


def filled() -> tuple[Any, list[Any]]:
    """A KV cache with two requests in it, and their tokens' rows."""
    cache, rows = layer_of_many(), [torch.randn(length, RANK + ROPE) for length in LENGTHS]
    for request, row in enumerate(rows):
        places = torch.arange(len(row))
        slots = TABLE[request, places // TOKENS] * TOKENS + places % TOKENS
        latent_attention.write(
            None,
            torch.cat([row[:, :RANK], torch.full((2, RANK), 7.0)]),
            torch.cat([row[:, RANK:], torch.full((2, ROPE), 7.0)]).unsqueeze(1),
            cache,
            torch.cat([slots, torch.tensor([-1, -1])]),  # padding is not written
            "auto",
            None,
        )
    return cache, rows


def test_only_the_tokens_own_places_are_written():
    cache, rows = filled()
    untouched = layer_of_many()
    for request, row in enumerate(rows):
        for token, expected in enumerate(row):
            block, offset = TABLE[request, token // TOKENS], token % TOKENS
            assert torch.equal(cache[block, offset], expected)
            untouched[block, offset] = expected
    assert torch.equal(cache, untouched)


def test_cached_tokens_are_gathered_from_where_each_request_begins():
    cache, rows = filled()
    found = torch.zeros(4 + 2, RANK + ROPE)
    latent_attention.gather(
        src_cache=cache,
        dst=found,
        block_table=TABLE,
        starts=torch.tensor([3, 1]),
        cu_seq_lens=torch.tensor([0, 4, 6]),
    )
    assert torch.equal(found, torch.cat([rows[0][3:7], rows[1][1:3]]))


def test_a_token_attends_to_its_own_context():
    cache, rows = filled()
    impl = SimpleNamespace(num_heads=HEADS, kv_lora_rank=RANK, scale=0.3)
    q = torch.randn(len(rows), HEADS, RANK + ROPE)
    of = SimpleNamespace(block_table=TABLE, seq_lens=torch.tensor(LENGTHS))
    parts = (q[..., :RANK], q[..., RANK:])
    out, lse = latent_attention.decode(impl, parts, cache, SimpleNamespace(decode=of), None)
    assert lse is None
    for request, row in enumerate(rows):
        weights = torch.softmax(q[request] @ row.T * 0.3, dim=-1)
        assert torch.allclose(out[request], weights @ row[:, :RANK], atol=1e-6)
