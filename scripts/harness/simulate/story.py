"""Prompts, the tokens that follow them, and the bytes that their blocks must have.

The KV of a token depends on all tokens before it, and on the weights. Here it is a digest of
them, so that a block's bytes tell which prompt, position and weights it is of.
"""

from functools import lru_cache
from hashlib import blake2b

TOKENS = 16  # of a block
KV = 8  # bytes of a token
BLOCK = TOKENS * KV


class Story:
    """The tokens of a prompt with what is generated after it, and their KV.

    Attributes:
        tokens: the prompt's, then the generated ones.
        kv: ``KV`` bytes per token.
    """

    def __init__(self, prompt: tuple[int, ...], generated: int, weights: int) -> None:
        self.tokens = list(prompt)
        digest = weights.to_bytes(KV, "big")
        parts = []
        for position in range(len(prompt) + generated):
            if position == len(self.tokens):
                self.tokens.append(2 + int.from_bytes(digest[:2], "big") % 250)
            word = self.tokens[position].to_bytes(2, "big")
            digest = blake2b(digest + word, digest_size=KV).digest()
            parts.append(digest)
        self.kv = b"".join(parts)

    def block(self, index: int) -> bytes:
        """Return the bytes of a whole block."""
        return self.kv[index * BLOCK : (index + 1) * BLOCK]


@lru_cache(maxsize=512)
def tell(prompt: tuple[int, ...], generated: int, weights: int) -> Story:
    """Return the story of a prompt under some weights."""
    return Story(prompt, generated, weights)
