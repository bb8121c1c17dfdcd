"""The sizes of a run, which every arm shares."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_TOKENS = 32
LAYERS = 4
# As many as attention heads: memory is mapped in whole pages, and a model with little KV would
# use so few that one more or less decides.
KV_HEADS = 8
BLOCK_BYTES = LAYERS * BLOCK_TOKENS * KV_HEADS * 64 * 2 * 4  # head size, K and V, float32
# kvcached maps pages of 2 MiB for every layer; a pool of whole pages is not rounded down.
PAGE_BLOCKS = (2 << 20) * LAYERS // BLOCK_BYTES


@dataclass(frozen=True)
class Size:
    """The size of a run.

    Attributes:
        repeats: of every arm and load, interleaved.
        blocks: KV blocks of one engine's budget on the device.
        tier_blocks: blocks of the CPU tier.
        prompt: tokens of a long prompt.
        prompts: prompts of the load without reuse.
        conversations, turns: of the load that returns.
        answer: tokens that are generated for each prompt.
        asked, long_answer: prompts of the load of long answers, and tokens of each answer.
        together: requests in flight.
        peak: prompts that a model has at once at its peak, when two share a device.
        neighbour_repeats: repeats of the two models.
    """

    repeats: int = 5
    blocks: int = 320
    tier_blocks: int = 2048
    prompt: int = 3072
    prompts: int = 8
    conversations: int = 5
    turns: int = 3
    answer: int = 32
    asked: int = 16
    long_answer: int = 128
    together: int = 2
    peak: int = 8
    neighbour_repeats: int = 5

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request, whole blocks."""
        longest = self.prompt + self.turns * 8 * BLOCK_TOKENS + self.answer
        return -(-longest // 1024) * 1024


FULL = Size()
SMOKE = Size(
    repeats=1,
    blocks=96,
    tier_blocks=512,
    prompt=1024,
    prompts=3,
    conversations=4,
    turns=2,
    answer=4,
    asked=3,
    long_answer=8,
    peak=6,
    neighbour_repeats=1,
)
