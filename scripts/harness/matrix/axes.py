"""The axes of the matrix, and the configuration that represents a cell."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from harness import parallel_drafts
from harness.experts import CHOSEN
from harness.matrix import shapes
from kvpatch import admitted, supported
from kvpatch.admitted import HYBRID, LATENT, SPARSE
from kvpatch.environ import FIRST_LIMIT, HOST_POOL, IDLE
from kvpatch.matrix.verdicts import LAYOUTS, NONE, RUNNERS, Cell
from kvpatch.patches.offloading.connector_rules import SELF_DESCRIBING
from kvpatch.patches.offloading.model_rules import DELTA, EXPERTS
from kvpatch.patches.offloading.rules import DRAFTING, STAGES
from kvpatch.versions import Facts, Installed, parsed


@dataclass(frozen=True)
class Connector:
    """One way to offload.

    Attributes:
        needs: the keys of ``shapes.PRESENCE`` that a release must have.
    """

    name: str
    connector: str
    extra: dict[str, Any]
    needs: tuple[str, ...]


_OFFLOADING, _SIMPLE = "OffloadingConnector", "SimpleCPUOffloadConnector"
CONNECTORS = (
    Connector("Offloading", _OFFLOADING, {}, (_OFFLOADING,)),
    Connector("Simple eager", _SIMPLE, {"lazy_offload": False}, (_SIMPLE,)),
    Connector("Simple lazy", _SIMPLE, {"lazy_offload": True}, (_SIMPLE,)),
    Connector(
        "tiering fs",
        _OFFLOADING,
        {
            "spec_name": "TieringOffloadingSpec",
            "secondary_tiers": [{"type": "fs", "root_dir": "/tiers"}],
        },
        (_OFFLOADING, "TieringOffloadingSpec"),
    ),
    Connector(
        "Multi",
        "MultiConnector",
        {"connectors": [{"kv_connector": _OFFLOADING, "kv_role": "kv_both"}]},
        (_OFFLOADING, "MultiConnector"),
    ),
)


@dataclass(frozen=True)
class Model:
    """One kind of KV cache.

    Attributes:
        facts: the attributes of vLLM's ``ModelConfig`` that are True for it.
        admitted: whether it starts in the cells of ``kvpatch.admitted`` only.
        since: the first release on which the harness has its kernels.
    """

    name: str
    architecture: str
    facts: tuple[str, ...] = ()
    admitted: bool = False
    since: str = "0"


MODELS = (
    Model("full attention", "LlamaForCausalLM"),
    Model("sliding window", "Gemma3ForCausalLM"),
    Model("latent attention", "DeepseekV2ForCausalLM", ("use_mla",), admitted=True),
    # Latent attention to tokens that an indexer chooses, whose keys have pages of another size.
    Model(SPARSE, "GlmMoeDsaForCausalLM", ("use_mla",), admitted=True, since="0.32"),
    Model("hybrid", "JambaForCausalLM", ("is_hybrid",), admitted=True),
)


@dataclass(frozen=True)
class Feature:
    """What an operator turns on beside the connector.

    Attributes:
        settings: by path in a ``VllmConfig``, what it sets there.
        models: the kinds of model that the matrix combines it with.
        extra: what it sets in ``kv_connector_extra_config``, of OffloadingConnector.
        since: the first release that has it, or in which it is not what others do anyway.
        v2_since: the first release whose Model Runner V2 has it, by vLLM's own list
            (``VllmConfig._get_v2_model_runner_unsupported_features``).
        admitted: whether it starts in the cells of ``kvpatch.admitted`` only.
        device: the type of device that it starts on; what starts on a GPU does on a CPU too.
        each: the kinds of model that it runs with one by one, with every connector, where it is no
            axis; of a pair, what ``PAIRS_OF_KINDS`` says.
    """

    name: str
    settings: dict[str, Any]
    models: tuple[str, ...]
    extra: dict[str, Any] = field(default_factory=dict)
    connectors: tuple[str, ...] = tuple(one.name for one in CONNECTORS)
    since: str = "0"
    v2_since: str = "0"
    admitted: bool = True
    device: str = "cuda"
    environment: dict[str, str] = field(default_factory=dict)
    each: tuple[str, ...] = ()


_RANKS = {"parallel_config.world_size": 2, "parallel_config.tensor_parallel_size": 2}
_EVENTS = {"kv_events_config": SimpleNamespace(enable_kv_cache_events=True)}
_FULL, _IN_PAGES = ("full attention",), ("full attention", "sliding window")
_CHUNKED = ("Offloading", "tiering fs", "Multi")  # those whose chunks and policies can be set
_V2_SINCE = {"ngram": "0.32", "draft model": "0.31"}
_IN_PARALLEL = dict.fromkeys(parallel_drafts.KINDS, "0.33")
_DRAFTED = ("sliding window", LATENT, SPARSE, HYBRID)  # kinds whose models have layers that draft
FEATURES = (
    Feature(NONE, {}, tuple(model.name for model in MODELS), admitted=False),
    # What kvpatch sees of fp8 is one byte for each value; which of the two it is the kernels know.
    Feature(
        "fp8",
        {"cache_config.cache_dtype": "fp8"},
        ("full attention", "hybrid", SPARSE),
        admitted=False,
    ),
    Feature("2 ranks", _RANKS, ("latent attention", "hybrid", SPARSE)),
    # Two stages of a pipeline. A tier's folder has not been looked at for stages.
    *(
        Feature(
            name,
            {
                "parallel_config.world_size": 2 * ranks,
                "parallel_config.pipeline_parallel_size": 2,
                "parallel_config.tensor_parallel_size": ranks,
            },
            _FULL,
            connectors=("Offloading", "Simple eager", "Simple lazy", "Multi"),
        )
        for ranks, name in STAGES.items()
    ),
    # Data parallelism: several engines of one server, of a dense model. Before 0.26 the tiers of
    # all ranks have one name.
    *(
        Feature(
            f"{size} engines",
            {
                "parallel_config.data_parallel_size": size,
                "parallel_config.data_parallel_size_local": size,
            },
            _FULL,
            connectors=connectors,
            since="0.26",
            device="cpu",
        )
        for size, connectors in ((2, tuple(one.name for one in CONNECTORS)), (4, ("Offloading",)))
    ),
    *(
        Feature(
            name,
            {"speculative_config": SimpleNamespace(method=method)},
            ("full attention", *(_DRAFTED if name == "mtp" else ())),
            since=_IN_PARALLEL.get(name, "0"),
            v2_since=_V2_SINCE.get(name, "0"),
        )
        for method, name in DRAFTING.items()
    ),
    # A prompt is computed in one step, however long it is.
    Feature("whole prompts", {"scheduler_config.enable_chunked_prefill": False}, _IN_PAGES),
    # All layers in one group, with the blocks that a window has left: up to 0.21 the default.
    Feature(
        "no hybrid manager",
        {"scheduler_config.disable_hybrid_kv_cache_manager": True},
        ("sliding window",),
        since="0.22",
    ),
    # Up to 0.28 a lookup ends at the first block that is missing, and counts no other.
    Feature(
        "store threshold",
        {},
        _FULL,
        extra={"store_threshold": 2},
        connectors=("Offloading", "Multi"),
        since="0.29",
    ),
    # Chunks of two of a model's blocks.
    Feature(
        "chunks",
        {},
        tuple(model.name for model in MODELS),
        extra={"block_size": 64},
        connectors=_CHUNKED,
    ),
    Feature(
        "no prefix cache", {"cache_config.enable_prefix_caching": False}, _FULL, connectors=_CHUNKED
    ),
)
DELTA_NETS = {"model_config.hf_text_config": SimpleNamespace(linear_num_value_heads=2)}
# Settings that are no axis: each runs once for each connector of a release, with one runner, layout
# and kind of model. The first three are validated alone by tests, but for the kinds in ``each``.
SETTINGS = (
    Feature("several ranks", _RANKS, _IN_PAGES, admitted=False),
    Feature("KV events", _EVENTS, _IN_PAGES, since="0.26", admitted=False, each=(LATENT, HYBRID)),
    Feature(
        "arc",
        {},
        _IN_PAGES,
        extra={"eviction_policy": "arc"},
        connectors=_CHUNKED,
        since="0.17",
        admitted=False,
        each=(LATENT, HYBRID),
    ),
    # Blocks of the same tokens that only the images, or sounds, before them tell apart.
    Feature("images", {}, _FULL, since="0.28", admitted=False),
    Feature("audio", {}, _FULL, since="0.33", admitted=False),
    # States of Qwen3-Next and Qwen3.5, in place of Mamba2's; before, a CPU has no kernels for them.
    Feature(DELTA, DELTA_NETS, (), since="0.33", admitted=False, each=(HYBRID,)),
    # CPU tiers of all engines in one pool. No GPU has run it.
    Feature(
        "host pool",
        {},
        _IN_PAGES,
        since="0.28",
        device="cpu",
        environment={HOST_POOL.name: "256MiB"},
        each=(LATENT, HYBRID),
    ),
    # From its first request on, an engine has a part of its device.
    Feature(
        "first limit",
        {},
        _FULL,
        since="0.28",
        environment={FIRST_LIMIT.name: "95%"},
        each=(LATENT, SPARSE, HYBRID),
    ),
    Feature(
        SELF_DESCRIBING,
        _EVENTS,
        _IN_PAGES,
        extra={"self_describing_kv_events": True},
        connectors=_CHUNKED,
        since="0.26",
    ),
    # An engine that is suspended, and then gives its memory back when it is idle.
    Feature(
        "idle",
        {},
        ("full attention", "sliding window", "latent attention"),
        connectors=("Offloading", "tiering fs", "Simple eager", "Simple lazy"),
        since="0.28",
        environment={IDLE.name: "2s"},
        each=(LATENT, SPARSE, HYBRID),
    ),
    # Ranks that have a part of each expert, or some of the experts.
    *(
        Feature(
            name,
            _RANKS | {"parallel_config.enable_expert_parallel": apart, "model_config.is_moe": True},
            _FULL,
            since="0.30" if apart else "0.28",  # before, a CPU's experts choose by themselves
            each=(LATENT, SPARSE, HYBRID),
        )
        for apart, name in EXPERTS.items()
    ),
)
TOGETHER = " + "  # between the names of two settings
# Settings that people turn on together: the first of a line with each of the others.
PAIRS = tuple(
    dict.fromkeys(
        pair
        for one, *others in (
            ("several ranks", "chunks", "no prefix cache", "store threshold", "whole prompts"),
            ("several ranks", "KV events", "arc", "host pool", "no hybrid manager"),
            ("chunks", "no prefix cache", "store threshold", "whole prompts", "KV events", "arc"),
            ("chunks", "fp8", "ngram", "draft model", "EAGLE", "2 stages", "host pool"),
            ("fp8", "no prefix cache", "store threshold", "whole prompts", "KV events", "arc"),
            ("EAGLE", "no prefix cache", "store threshold", "whole prompts", "KV events", "arc"),
            ("ngram", "whole prompts", "KV events", "host pool"),
            ("draft model", "whole prompts", "KV events", "host pool"),
            ("host pool", "fp8", "EAGLE", "store threshold", "no prefix cache", "KV events", "arc"),
            ("no hybrid manager", "KV events", "chunks", "host pool"),
            ("first limit", "several ranks", "chunks", "fp8", "EAGLE", "host pool", "KV events"),
            ("first limit", "2 engines"),
            ("idle", "several ranks", "fp8", "EAGLE", "KV events", "whole prompts", "arc"),
            ("idle", "first limit", "no hybrid manager", "ngram", "draft model"),
            ("idle", "chunks", "store threshold", "host pool"),
            ("fp8", "several ranks", "ngram", "draft model", "EAGLE"),
            ("several ranks", "ngram", "draft model", "EAGLE"),
            ("no prefix cache", "idle", "first limit"),
            ("mtp", "several ranks", "chunks", "fp8", "expert parallelism"),
            ("expert parallelism", "chunks", "fp8", "idle", "first limit"),
            ("EAGLE-3", "several ranks", "chunks", "fp8", "idle", "first limit"),
        )
        for pair in (tuple(sorted((one, other))) for other in others)
    )
)

_BESIDE_DELTA = ("several ranks", "chunks", "fp8", "idle", "first limit", "mtp")
# Of them those that run with kinds of model that start only where they ran.
PAIRS_OF_KINDS = {
    HYBRID: tuple(
        admitted.together(*pair)
        for pair in (
            ("chunks", "fp8"),
            *((one, "several ranks") for one in ("chunks", "fp8", "idle", "first limit")),
            *(("idle", one) for one in ("chunks", "fp8")),
            *(("first limit", one) for one in ("chunks", "fp8")),
            *(("mtp", one) for one in ("several ranks", "chunks", "fp8")),
            *((DELTA, one) for one in _BESIDE_DELTA),
        )
    ),
    LATENT: tuple(admitted.together("mtp", one) for one in ("several ranks", "chunks")),
    SPARSE: tuple(
        admitted.together(*pair)
        for pair in (
            *combinations(("chunks", "fp8", "first limit", "idle", "several ranks"), 2),
            *(("mtp", one) for one in ("several ranks", "chunks", "fp8")),
            *(("expert parallelism", one) for one in ("chunks", "fp8")),
        )
        if pair != ("first limit", "idle")
    ),
}


# What runs once for each connector.
TRIED = (
    *("KV events", "arc"),
    "host pool",
    "idle",
    "first limit",
    SELF_DESCRIBING,
    *(admitted.together(*pair) for pair in PAIRS),
    *EXPERTS.values(),
    "images",
    DELTA,
    # Behind the others, which take turns by their places.
    *(admitted.together(DELTA, one) for one in _BESIDE_DELTA),
    *(
        admitted.together(draft, one)
        for draft in parallel_drafts.KINDS
        for one in ("several ranks", "chunks", "fp8", "idle", "first limit")
    ),
    "audio",
)


def cells(vllm: str | None = None) -> Iterator[Cell]:
    """Yield every cell of the matrix, or of one release of vLLM."""
    every = [release for release in shapes.releases("vllm") if vllm in (None, release)]
    connectors = [connector.name for connector in CONNECTORS]
    both = [(model, feature) for feature in FEATURES for model in feature.models]
    for one in product(every, RUNNERS, LAYOUTS, connectors, both):
        release, runner, layout, connector, (model, feature) = one
        if connector in feature.connectors and parsed(release) >= _since(feature.name, model):
            yield Cell(release, runner, layout, connector, model, feature.name)


@cache
def _since(feature: str, model: str) -> Version:
    """Return the first release on which a feature, by its name, runs with a kind of model."""
    of_model = next(one.since for one in MODELS if one.name == model)
    return max(Version(_named(feature).since), Version(of_model))


def connector_of(cell: Cell) -> Connector:
    """Return the connector of a cell."""
    return next(one for one in CONNECTORS if one.name == cell.connector)


def tried_cells(vllm: str) -> Iterator[Cell]:
    """Yield the cells of a release in which ``TRIED`` runs: one for each connector.

    Layouts, kinds of model and the modes of SimpleCPUOffloadConnector take turns.
    """
    newest = RUNNERS[Version(vllm) >= Version("0.28")]
    for number, name in enumerate(TRIED):
        feature = _named(name)
        runner = RUNNERS[0] if "ngram" in name.split(TOGETHER) else newest
        modes = ("Simple eager", "Simple lazy")
        for offset, connector in enumerate(
            ("Offloading", "tiering fs", modes[number % 2], "Multi")
        ):
            is_there = connector in feature.connectors and (feature.models or feature.each)
            is_paired = len(name.split(TOGETHER)) > 1
            if not is_there or Version(vllm) < Version(feature.since):
                continue
            if is_paired and connector == "Multi":
                continue
            turn = number + offset
            models = feature.models[:1] if is_paired else feature.models
            kinds = feature.each
            if models and models[0] in admitted.KINDS:
                models, kinds = (), models
            if models:
                model = models[turn // 2 % len(models)]
                yield Cell(vllm, runner, LAYOUTS[turn % 2], connector, model, name)
            # Of what drafts by itself these kinds run in one mode only.
            in_one_mode = not models or "mtp" in name.split(TOGETHER)
            own = modes[0] if connector in modes and in_one_mode else connector
            for kind in kinds:
                if Version(vllm) >= _since(name, kind):
                    yield Cell(vllm, runner, LAYOUTS[0], own, kind, name)


def settings_of(cell: Cell) -> tuple[str, ...]:
    """Return the names of what is turned on in a cell: one, or those of a pair."""
    return tuple(cell.feature.split(TOGETHER))


def feature_of(cell: Cell) -> Feature:
    """Return the feature of a cell, or both of a pair as one."""
    return _named(cell.feature)


@cache
def _named(name: str) -> Feature:
    one, is_pair, other = name.partition(TOGETHER)
    if is_pair:
        return _both(_named(one), _named(other))
    return next(feature for feature in (*FEATURES, *SETTINGS) if feature.name == name)


def _both(one: Feature, other: Feature) -> Feature:
    name = admitted.together(one.name, other.name)
    return Feature(
        name,
        one.settings | other.settings,
        tuple(model for model in one.models if model in other.models),
        one.extra | other.extra,
        tuple(connector for connector in one.connectors if connector in other.connectors),
        max(one.since, other.since, key=Version),
        max(one.v2_since, other.v2_since, key=Version),
        device="cpu" if "cpu" in (one.device, other.device) else one.device,
        environment=one.environment | other.environment,
        each=tuple(kind for kind, pairs in PAIRS_OF_KINDS.items() if name in pairs),
    )


def model_of(cell: Cell) -> Model:
    """Return the kind of model of a cell."""
    return next(one for one in MODELS if one.name == cell.model)


def only_admitted(cell: Cell) -> bool:
    """Return whether a cell starts only if ``kvpatch.admitted`` has it."""
    return feature_of(cell).admitted or model_of(cell).admitted


def facts_of(cell: Cell, device: str) -> Facts:
    """Return what is installed and set where a cell runs."""
    return Facts(
        vllm=Installed.release("vllm", cell.vllm),
        kvcached=Installed.release("kvcached", supported.KVCACHED[-1]),
        environment=feature_of(cell).environment,
        device=device,
        contiguous=cell.layout == "contiguous",
    )


def configuration_of(cell: Cell) -> Any:
    """Return a ``VllmConfig`` of the cell, as the configuration rules read it.

    Everything that is not an axis of the matrix has vLLM's default.
    """
    connector = connector_of(cell)
    model = model_of(cell)
    facts = {"use_mla": False, "is_hybrid": False, "is_encoder_decoder": False}
    made = SimpleNamespace(
        use_v2_model_runner=cell.runner == "V2",
        kv_transfer_config=SimpleNamespace(
            kv_connector=connector.connector,
            kv_connector_module_path=None,
            kv_connector_extra_config=_with(connector.extra, feature_of(cell).extra),
            kv_role="kv_both",
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto", block_size=32),
        parallel_config=SimpleNamespace(
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_size_local=1,
            data_parallel_backend="mp",
            decode_context_parallel_size=1,
            distributed_executor_backend=None,
        ),
        attention_config=SimpleNamespace(hisparse_config=None),
        scheduler_config=SimpleNamespace(
            async_scheduling=None,
            policy="fcfs",
            scheduler_cls=None,
            enable_chunked_prefill=True,
            # The default with a connector before 0.22.
            disable_hybrid_kv_cache_manager=Version(cell.vllm) < Version("0.22"),
        ),
        speculative_config=None,
        kv_events_config=None,
        model_config=SimpleNamespace(
            architecture=model.architecture,
            hf_text_config=SimpleNamespace(index_topk=CHOSEN) if model.name == SPARSE else None,
            get_sliding_window=lambda: 256 if model.name == "sliding window" else None,
            **facts | dict.fromkeys(model.facts, True),
        ),
    )
    return configured(made, feature_of(cell).settings)


def configured(made: Any, settings: Mapping[str, Any]) -> Any:
    """Return a ``VllmConfig`` in which settings are others, by path."""
    for path, value in settings.items():
        owner, _, name = path.rpartition(".")
        setattr(attrgetter(owner)(made) if owner else made, name, value)
    return made


def _with(extra: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return a ``kv_connector_extra_config`` with more for OffloadingConnector in it."""
    if "connectors" not in extra:
        return extra | more
    inside = [one | {"kv_connector_extra_config": more} for one in extra["connectors"]]
    return extra | {"connectors": inside}
