"""The two models of the demo, real ones where they can be had, and the load that suits them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import smollm2
from harness.console import HarnessError
from harness.demo.servers import MODELS
from harness.model_cache import kept_model

# As many as attention heads: with less, a model's peak would be few pages.
KV_HEADS = 8
SEEDS = (7, 8)


@dataclass(frozen=True)
class Load:
    """The size of the load.

    Attributes:
        opening: tokens of the page that a conversation begins with.
        answer_tokens: of every answer, at most.
        whole: every answer has as many, whatever its model would end it with.
        conversations: of each model.
    """

    opening: int
    answer_tokens: int
    whole: bool = False
    conversations: int = 8


REAL = Load(opening=1100, answer_tokens=24)
# One token a byte, and hardly any computation: long answers keep a peak's requests together.
GENERATED = Load(opening=2400, answer_tokens=64, whole=True)
QUICK = 4  # conversations


@dataclass(frozen=True)
class Models:
    """Two models.

    Attributes:
        folders: by name.
        load: that suits their size and their tokenizer.
        words: what they are, for the report.
    """

    folders: dict[str, Path]
    load: Load
    words: str

    @property
    def real(self) -> bool:
        """Whether their answers are text."""
        return not self.load.whole


def models(generated: bool, say: Callable[[str], None]) -> Models:
    """Return the models, which are made first where they are not kept.

    Args:
        generated: no real ones.
        say: told what is made, and why real ones cannot be had.

    Raises:
        HarnessError: none could be made.
    """
    if not generated:
        try:
            kept = smollm2.kept(say)
        except HarnessError as error:
            say(
                f"{smollm2.NAME} cannot be had here ({str(error).splitlines()[-1]}), so the "
                "models are two with random weights, whose answers are noise"
            )
        else:
            words = f"{smollm2.NAME} twice, each engine with weights and conversations of its own"
            return Models(dict.fromkeys(MODELS, kept), REAL, words)
    folders = {
        name: kept_model(seed, say, KV_HEADS) for name, seed in zip(MODELS, SEEDS, strict=True)
    }
    return Models(
        folders, GENERATED, "two of 4 layers with random weights, whose answers are noise"
    )
