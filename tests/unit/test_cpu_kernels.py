"""The kernels that the harness brings to vLLM's CPU build, against the same computed plainly."""

import pytest

pytest.importorskip("torch")  # scripts/pythons is without

import torch

from harness.engines import cpu_kernels

CHANNELS, TAPS, DRAFTS = 6, 4, 2


@pytest.mark.parametrize("accepted", [(1, 1, 1), (3, 1, 2), (2, 3, 1)])
def test_a_convolution_goes_on_behind_what_was_accepted(accepted):
    """Drafts that were not accepted leave no trace in what comes behind them."""
    drawn = torch.Generator().manual_seed(1)
    weight = torch.randn(CHANNELS, TAPS, generator=drawn)
    bias = torch.randn(CHANNELS, generator=drawn)
    states = torch.zeros(5, CHANNELS, TAPS - 1 + DRAFTS)
    blocks, kept, size = [4, 2], {4: [], 2: []}, 1 + DRAFTS
    before = (1, 1)
    for step, count in enumerate(accepted):
        x = torch.randn(2 * size, CHANNELS, generator=drawn)
        ends = [0, size, 2 * size]
        found = cpu_kernels.convolved(x, states, weight, bias, ends, before, blocks)
        for number, block in enumerate(blocks):
            tokens = [*kept[block], *x[number * size : (number + 1) * size]]
            assert torch.allclose(
                found[number * size : (number + 1) * size],
                plain(tokens, weight, bias)[-size:],
                atol=1e-5,
            ), (step, block)
            kept[block] = tokens[: len(tokens) - size + count]
        before = (count, count)


@pytest.mark.parametrize("accepted", [(1, 1, 1), (3, 1, 2), (2, 3, 1)])
def test_states_go_on_behind_what_was_accepted(accepted):
    """The state behind each token is where the next step finds it."""
    heads, size, n, tokens = 4, 3, 5, 1 + DRAFTS
    drawn = torch.Generator().manual_seed(1)
    a, d = -torch.rand(heads, size, n, generator=drawn), torch.rand(heads, size, generator=drawn)
    bias = torch.randn(heads, size, generator=drawn)
    states, before, rows = torch.zeros(9, heads, size, n), (1, 1), [[3, 8, 1], [2, 4, 7]]
    kept = [torch.zeros(heads, size, n)] * 2
    for step, count in enumerate(accepted):
        x, dt = torch.randn(2, 2 * tokens, heads, size, generator=drawn)
        b, c = torch.randn(2, 2 * tokens, 1, n, generator=drawn)
        ends = [0, tokens, 2 * tokens]
        found = cpu_kernels.scanned(states, x, (dt, a, b, c, d, bias), ends, before, rows)
        for number, row in enumerate(rows):
            state = kept[number]
            for token, block in enumerate(row, number * tokens):
                width = torch.log1p(torch.exp(dt[token] + bias))[..., None]
                state = torch.exp(width * a) * state + width * x[token][..., None] * b[token]
                out = (state @ c[token][0]) + d * x[token]
                assert torch.allclose(found[token], out, atol=1e-4), (step, token)
                assert torch.allclose(states[block], state, atol=1e-4), (step, token)
                if token == number * tokens + count - 1:
                    kept[number] = state
        before = (count, count)


def plain(tokens, weight, bias):
    """Return the convolution of all tokens of a request, from its first on."""
    seen = torch.cat([torch.zeros(TAPS - 1, CHANNELS), torch.stack(tokens)])
    each = [(seen[at : at + TAPS].T * weight).sum(-1) + bias for at in range(len(tokens))]
    return torch.nn.functional.silu(torch.stack(each))
