"""How answers of servers on the emulated CUDA device are compared."""

import pytest

from harness.cuda import served

RIGHT = [(5, 6, 0.5), (7, 8, 0.01), (9, 3, 0.4)]


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5, 7, 9], ""),
        ([5, 8, 4], "ties"),  # and what comes behind it is another text
        ([5, 3, 9], "wrong answers"),  # not the next best
        ([6, 7, 9], "wrong answers"),  # by more than last digits
        ([5, 7, 3], "wrong answers"),
    ],
)
def test_only_the_next_best_token_by_last_digits_is_a_tie(tokens, expected):
    """A tie is counted apart from a wrong answer."""
    mine = [(token, 0, 1.0) for token in tokens]
    assert served.differs(mine, RIGHT) == expected


def test_a_token_has_the_next_best_beside_it():
    """Also where the sampled one is not the best."""
    said = {
        "tokens": ["token_id:5", "token_id:7"],
        "top_logprobs": [
            {"token_id:5": -0.25, "token_id:6": -0.75},
            {"token_id:8": -0.5, "token_id:2": -1.0, "token_id:7": -2.0},
        ],
    }
    assert served.tokens_of(said) == [(5, 6, 0.5), (7, 8, -1.5)]
