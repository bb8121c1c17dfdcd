"""What starts only where an engine ran with it: the cells, by what is turned on.

``admitted.json`` is made of the recorded runs by ``scripts/matrix admit``, and by
``scripts/matrix try`` once the engines ran. A rule asks for the cell of a configuration, so that
what did not run is refused, without a list of exceptions to keep.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from kvpatch.supported import in_ranges, validated
from kvpatch.versions import Installed, in_words

FILE = Path(__file__).with_name("admitted.json")

Table = Mapping[str, Mapping[str, list[str]]]  # cells by feature and release
# Kinds of model that start only in the cells that ran, by the names of the matrix' axis.
LATENT, SPARSE, HYBRID = "latent attention", "sparse attention", "hybrid"
# What runs may have in common: all others, or one of these.
KINDS = ("", LATENT, SPARSE, HYBRID)


@cache
def table() -> Table:
    """Return the cells that are admitted."""
    found: Table = json.loads(FILE.read_text())
    return found


def name_of(runner: str, layout: str, connector: str, model: str) -> str:
    """Return the name of a cell of a release and feature, by the names of the matrix' axes."""
    return ", ".join((runner, layout, connector, model))


def admits(feature: str, vllm: Installed, wanted: Iterable[str]) -> bool:
    """Return whether a feature starts on a release in all cells of these names."""
    names, known = set(wanted), set(validated())
    return any(
        vllm.is_one_of([release]) and names <= set(admitted)
        for release, admitted in table().get(feature, {}).items()
        if release in known
    )


def ran_with(name: str, vllm: Installed, connectors: Iterable[str], model: str = "") -> bool:
    """Return whether what is no axis of the matrix ran with all of these connectors.

    Of such a name the table has connectors, by ``kind_of``: it ran with each in one cell.

    Args:
        name: what is turned on.
        vllm: the release.
        connectors: by the names of the matrix' axis.
        model: its kind, where the name is asked of each kind by itself.
    """
    return admits(name, vllm, (kind_of(one, model) for one in connectors))


def kind_of(connector: str, model: str = "") -> str:
    """Return a connector without its mode, with a kind of model that starts in its cells only."""
    kind = "Simple" if connector.startswith("Simple") else connector
    return f"{kind} ({model})" if model in KINDS[1:] else kind


def together(one: str, other: str) -> str:
    """Return the name of two settings that are turned on together."""
    return " + ".join(sorted((one, other)))


def where(*features: str, how: str = "", model: str = "") -> str:
    """Return where any of the features is validated, for the reason of a refusal.

    Args:
        features: their names.
        how: what else must hold for them.
        model: only with this kind of model, by its name on the matrix' axis.
    """
    known = _releases(features, model)
    if not known:
        return "on no release yet"
    beside = f" and {how}," if how else ""
    of_each = "in the combinations that kvpatch matrix --vllm RELEASE lists"
    return f"on vLLM {in_ranges(known)}{beside} only, {of_each}"


def releases_with(name: str, connector: str) -> list[str]:
    """Return the releases on which what is no axis of the matrix starts with a connector."""
    found = table().get(name, {})
    return [one for one in validated() if kind_of(connector) in found.get(one, ())]


def with_connectors(name: str) -> str:
    """Return the releases and connectors that what is no axis ran with, for a sentence."""
    each = []
    for model in KINDS:
        on: dict[tuple[str, ...], list[str]] = {}
        for release in validated():
            found = [one.partition(" (") for one in table().get(name, {}).get(release, ())]
            if who := tuple(one for one, _, kind in found if kind.rstrip(")") == model):
                on.setdefault(who, []).append(release)
        of_model = f"{model} " if model else ""
        each += [
            f"{of_model}on vLLM {in_ranges(of)} with {in_words(who)}" for who, of in on.items()
        ]
    return "; ".join(each) or "on no release yet"


def why(*features: str, how: str = "", model: str = "") -> str:
    """Return why a configuration with one of the features is refused."""
    return f"it is validated {where(*features, how=how, model=model)}"


def but(*features: str, how: str = "", model: str = "") -> str:
    """Return what is not refused, for the end of a line of the documentation; empty for nothing."""
    known = _releases(features, model)
    beside = f" and {how}" if how else ""
    return f", except as the table says on vLLM {in_ranges(known)}{beside}" if known else ""


def _releases(features: Iterable[str], model: str) -> list[str]:
    admitted = {
        release
        for one in features
        for release, names in table().get(one, {}).items()
        if any(name.endswith(model) for name in names)
    }
    return [release for release in validated() if release in admitted]


def forget() -> None:
    """Clear what is remembered of the file."""
    table.cache_clear()
