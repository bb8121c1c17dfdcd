"""The recipes, and the ``VllmConfig`` of each as kvpatch's rules read it.

``recipes.json`` has facts of vLLM's recipes: the options that a rule may read, and, of public
configurations of the models, the kind of KV cache. What only a checkpoint says
(``kv_cache_scheme``) is not in it.
"""

import copy
import json
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from harness.matrix import axes
from kvpatch.matrix.verdicts import LAYOUTS, Cell

FILE = Path(__file__).with_name("recipes.json")
GPUS = 8  # of the node
RUNNER = "V2"  # vLLM's choice on a GPU for all of these
DEFAULT = "default"
COMPRESSED = {"compressed_sparse_attention": 4}  # what has such layers; how many is not asked
# Of a recipe's strategies of one node; a recipe has the first one at least.
TENSOR, EXPERTS, DATA = "single_node_tp", "single_node_tep", "single_node_dep"


class Recipe(NamedTuple):
    """One way to start a model.

    Attributes:
        variant: of the recipe: another checkpoint of the model.
        preset: of the recipes' KV offloading.
        strategy: how the model is spread over the node.
        draft: vLLM's method of speculative decoding; empty for none.
    """

    model: str
    variant: str
    preset: str
    strategy: str = TENSOR
    draft: str = ""


class Recipes:
    """What ``recipes.json`` has."""

    def __init__(self, file: Path = FILE) -> None:
        found = json.loads(file.read_text())
        self.source: str = found["source"]
        self.presets: dict[str, dict[str, Any]] = found["presets"]
        # The day of the first count, and what it admitted of each preset by what was turned on.
        self.first: dict[str, Any] = found["first"]
        self._models: dict[str, dict[str, Any]] = {one["model"]: one for one in found["recipes"]}

    def plain(self) -> Iterator[Recipe]:
        """Yield every recipe with every preset and variant, as the recipe has it by default."""
        for name, model in self._models.items():
            for preset in self.presets:
                for variant in model["variants"]:
                    yield Recipe(name, variant, preset)

    def drafting(self) -> Iterator[Recipe]:
        """Yield each with each of its ways to make drafts."""
        for one in self.plain():
            for draft in self._models[one.model]["drafts"]:
                yield one._replace(draft=draft)

    def spread(self, strategy: str) -> Iterator[Recipe]:
        """Yield each that has a strategy, with it."""
        for one in self.plain():
            if strategy in self._models[one.model]["strategies"]:
                yield one._replace(strategy=strategy)

    def ranks(self, recipe: Recipe) -> int:
        """Return the GPUs that a recipe takes."""
        model = self._models[recipe.model]
        variant = model["variants"][recipe.variant]
        options = _options(model["args"] + variant["args"])
        return int(options.get("--tensor-parallel-size", variant["tensor_parallel_size"]))

    def configuration(self, recipe: Recipe, vllm: str) -> Any:
        """Return the ``VllmConfig`` of a recipe; what it does not set has vLLM's default."""
        model = self._models[recipe.model]
        options = _options(model["args"] + model["variants"][recipe.variant]["args"])
        preset = self.presets[recipe.preset]
        made = axes.configuration_of(
            Cell(vllm, RUNNER, LAYOUTS[0], axes.CONNECTORS[0].name, model["kind"])
        )
        made.kv_transfer_config.kv_connector = preset["kv_connector"]
        made.kv_transfer_config.kv_connector_extra_config = copy.deepcopy(
            preset["kv_connector_extra_config"]
        )
        made.model_config.architecture = model["architecture"]
        made.cache_config.cache_dtype = options.get("--kv-cache-dtype", "auto")
        made.cache_config.block_size = int(options.get("--block-size", 16))
        made.cache_config.enable_prefix_caching = "--no-enable-prefix-caching" not in options
        parallel, ranks = made.parallel_config, self.ranks(recipe)
        parallel.enable_expert_parallel = (
            recipe.strategy != TENSOR or "--enable-expert-parallel" in options
        )
        if recipe.strategy == DATA:
            parallel.data_parallel_size = parallel.data_parallel_size_local = GPUS
            ranks = 1
        parallel.world_size = parallel.tensor_parallel_size = ranks
        made.model_config.is_moe = model["experts"]
        if model.get("compresses"):
            made.model_config.hf_text_config.compress_rates = COMPRESSED
        if recipe.draft:
            # vLLM has one name for all drafts inside of a model.
            method = "mtp" if recipe.draft.endswith("_mtp") else recipe.draft
            made.speculative_config = SimpleNamespace(method=method)
        return made


def _options(arguments: list[str]) -> dict[str, str]:
    """Return options of a command line by name; the last of several counts, as in vLLM."""
    found = {}
    for option, value in zip_longest(arguments, arguments[1:], fillvalue=""):
        if option.startswith("--"):
            found[option] = "" if value.startswith("--") else value
    return found
