"""The table says of every patch what the documentation promises."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kvpatch import gate, registry
from kvpatch.patch import Feature, Patch

ROOT = Path(__file__).parents[2]
PATCHES = [
    pytest.param(feature, patch, id=patch.id)
    for feature in registry.FEATURES
    for patch in feature.patches
]
FEATURES = [pytest.param(feature, id=feature.name) for feature in registry.FEATURES]


def bounded(specifier: str) -> bool:
    """Whether there are versions above every one that ``specifier`` contains."""
    return all(
        any(part.operator in ("<", "<=", "==", "~=") for part in parts)
        for parts in gate.alternatives(specifier)
    )


def parameters(reference: str) -> list[str]:
    """The parameter names of the function ``module:name``, without importing it."""
    module, _, name = reference.partition(":")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
    (function,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    return [argument.arg for argument in function.args.args]


def test_the_ids_are_unique():
    ids = [patch.id for feature in registry.FEATURES for patch in feature.patches]
    assert len(ids) == len(set(ids))
    names = [feature.name for feature in registry.FEATURES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("feature", "patch"), PATCHES)
def test_every_field_is_filled(feature: Feature, patch: Patch):
    for name in ("id", "target", "why", "upstream", "until", "wrapper", "vllm", "kvcached"):
        text = getattr(patch, name)
        assert text.strip() == text != ""
    assert patch.target.count(":") == patch.wrapper.count(":") == 1


@pytest.mark.parametrize(("feature", "patch"), PATCHES)
def test_the_wrapper_exists_and_takes_what_it_is_given(feature: Feature, patch: Patch):
    taken = parameters(patch.wrapper)
    if patch.kind == "wrap":
        assert taken == ["wrapped", "instance", "args", "kwargs"]
    else:
        assert len(taken) == 1


@pytest.mark.parametrize(("feature", "patch"), PATCHES)
def test_the_range_of_a_patch_is_closed(feature: Feature, patch: Patch):
    assert bounded(patch.vllm)
    assert bounded(patch.kvcached)


@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: Feature):
    assert feature.summary
    assert feature.patches
    assert bounded(feature.vllm)
    assert bounded(feature.kvcached)
    if feature.wanted is not None:
        assert parameters(feature.wanted) == []


@pytest.mark.parametrize("specifier", [registry.VLLM_RANGE, registry.KVCACHED_RANGE])
def test_the_ranges_of_kvpatch_are_closed(specifier: str):
    assert bounded(specifier)


def test_an_open_range_would_be_seen():
    assert not bounded(">=0.12")
    assert not bounded("!=0.12,>0.1")
    assert not bounded("")
    assert not bounded("==0.12 or >=0.14")
    assert bounded(">=0.12,<0.29")
    assert bounded("==0.12 or ==0.14")
