"""The two models of the demo: real ones where they can be had."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import smollm2
from harness.console import HarnessError
from harness.demo.options import GENERATED, REAL, Loads
from harness.demo.servers import MODELS
from harness.model_cache import kept_model

# As many as attention heads: with less, a model's peak would be few pages.
KV_HEADS = 8
SEEDS = (7, 8)


@dataclass(frozen=True)
class Models:
    """Two models.

    Attributes:
        folders: by name.
        loads: that suit their size and their tokenizer.
        words: what they are, for the report.
        real: whether their answers are text.
    """

    folders: dict[str, Path]
    loads: Loads
    words: str
    real: bool


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
            return Models(dict.fromkeys(MODELS, kept), REAL, words, real=True)
    folders = {
        name: kept_model(seed, say, KV_HEADS) for name, seed in zip(MODELS, SEEDS, strict=True)
    }
    words = "two of 4 layers with random weights, whose answers are noise"
    return Models(folders, GENERATED, words, real=False)
