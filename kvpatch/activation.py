"""Activation: the steps before and after vllm's own code runs.

The order is fixed here and does not depend on which startup file ran first: gates
that need no import, vllm, kvcached's patches, import hooks of other packages on vllm,
then kvpatch's patches. If a feature cannot be applied completely, everything is reverted.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import wrapt

from kvpatch import (
    distributions,
    environ,
    gate,
    host_memory,
    patches,
    refusal_report,
    verdicts,
    versions,
)
from kvpatch.environ import ALLOW_VLLM, KVCACHED_SWITCHES
from kvpatch.logs import debug_if_asked, log
from kvpatch.patch import Outcome, Transaction, load
from kvpatch.process import started_by_multiprocessing
from kvpatch.refusal import Refusal, RefusedImport
from kvpatch.status import record
from kvpatch.supported import is_validated, release_of
from kvpatch.versions import Facts

transaction = Transaction(guard=refusal_report.guard)
_refused: Refusal | None = None


def before_vllm() -> None:
    """Check the gates that need no import, and switch kvcached on.

    Raises:
        RefusedImport: a gate refuses, now or at an earlier import of vllm.
    """
    refusal_report.in_one_line()
    debug_if_asked()
    if _refused is not None:
        raise RefusedImport.of(_refused)
    if record.facts is not None:
        return  # another finder asked for the same import
    warn_of_unknown()
    try:
        record.early, record.verified = verdicts.early(), verdicts.inherited()
        record.facts = facts_here()
        gate.require(patches.FEATURES, record.facts)
        for feature in patches.FEATURES:
            if feature.prepare is not None:
                load(feature.prepare)()
    except Exception as error:
        raise _stay_refused(error) from error.__cause__
    log.debug("kvpatch: the gates before vllm are passed")
    for name in KVCACHED_SWITCHES:
        if not name.read():
            os.environ[name.name] = "1"


def warn_of_unknown() -> None:
    """Warn of variables that nothing reads, in the process that the operator started."""
    if started_by_multiprocessing():
        return
    for name, meant in environ.unknown():
        hint = f"; did you mean {meant}?" if meant else ""
        log.warning("kvpatch: %s is set, and kvpatch has no such variable%s", name, hint)


def after_vllm(module: ModuleType) -> None:
    """Apply kvcached's patches and kvpatch's to vllm, whose module has just been executed.

    Raises:
        RefusedImport: a patch of kvpatch cannot be applied; all of them are reverted.
    """
    if transaction.applied:
        return  # the inner of two loaders applied them, or vllm is being reloaded
    try:
        debug_if_asked()
        apply_features(before_kvcached=True)
        apply_kvcached()
        # Import hooks of other packages, and kvcached's again if its module was imported
        # before vllm: a hook that ran after kvpatch would patch over kvpatch's patches.
        wrapt.notify_module_loaded(module)
        require_distributions()
        require_driver()
        apply_features(before_kvcached=False)
    except Exception as error:
        revert()
        refusal_report.forget_submodules()
        raise _stay_refused(error) from error


def facts_here() -> Facts:
    """Return the facts of this process, after the gates that need no import.

    Raises:
        Refusal: a gate refuses.
    """
    found = {package: versions.installed(package) for package in ("vllm", "kvcached")}
    refusal = gate.check_environment()
    for package, every in found.items():
        refusal = refusal or gate.check_installed(package, every, lifted=record.early)
    if refusal is not None:
        raise refusal
    memory = host_memory.reader()
    return Facts(found["vllm"][0], found["kvcached"][0], os.environ, memory=memory)


def require_distributions() -> None:
    """Refuse a vLLM that has chosen a platform for which a distribution is not installed.

    It may for other reasons than its version, which the gates before it read.

    Raises:
        Refusal: the host device, or what is for NPUs, is needed and not there.
    """
    from vllm.platforms import current_platform

    refusal = distributions.refusal(current_platform.is_cpu(), os.environ)
    if refusal is not None:
        raise refusal


def require_driver() -> None:
    """Refuse a kvcached that is built for a GPU where no driver of one is.

    Raises:
        Refusal: it does not load for that.
    """
    try:
        importlib.import_module("kvcached._C")
    except ModuleNotFoundError:
        return  # kvcached's own modules say so, to the gates of the features
    except ImportError as error:
        if "libcuda.so" not in str(error):
            return
        raise Refusal(
            "kvcached is built for a GPU, and this machine has no driver for one",
            f"it failed with {type(error).__name__}: {error}",
            "install NVIDIA's driver or, in a container, start it with the GPU (docker run --gpus "
            "all), or set KVPATCH=0",
            code="KVP501",
        ) from error


def apply_kvcached() -> None:
    """Let kvcached patch vllm now, if its own hook has not done so yet.

    kvcached's hook performs the same import, so that the second of the two has no effect.

    Raises:
        Refusal: kvcached cannot be imported.
    """
    try:
        importlib.import_module("kvcached.integration.vllm.autopatch")
    except Exception as error:
        raise Refusal(
            "kvcached cannot be imported",
            f"it failed with {type(error).__name__}: {error}",
            "reinstall kvcached for this torch, or set KVPATCH=0",
            code="KVP110",
        ) from error


def apply_features(before_kvcached: bool) -> None:
    """Apply every feature that this machine needs.

    Args:
        before_kvcached: apply the features that precede kvcached's patches to vllm, or all
            others.

    Raises:
        Refusal: a required feature cannot be applied.
    """
    assert record.facts is not None
    vllm = record.facts.vllm
    record.applied = transaction.applied
    if before_kvcached:
        record.rules = [feature.rules for feature in patches.FEATURES if feature.rules]
    elif not is_validated(vllm):
        named = gate.allowed_by_name(vllm)
        log.warning(
            "kvpatch: %s %s is NOT VALIDATED and starts because %s",
            vllm.distribution,
            vllm.text,
            f"{ALLOW_VLLM} names it" if named else "of kvpatch verify",
        )
    for feature in patches.FEATURES:
        if feature.before_kvcached is not before_kvcached:
            continue
        verdict = gate.check_feature(feature, vllm, lifted=record.early)
        if verdict.passed:
            try:
                rows = feature.at(release_of(vllm))
                transaction.apply_all(rows)
                for patch in rows:
                    log.debug("kvpatch: applied %s to %s", patch.id, patch.target)
            except Exception as error:
                verdict = gate.Verdict(Outcome.FAILED, f"{type(error).__name__}: {error}")
        record.features[feature.name] = verdict.outcome
        log.debug("kvpatch: feature %s %s %s", feature.name, verdict.outcome.value, verdict.reason)
        refusal = gate.refusal(feature, verdict)
        if refusal is not None:
            raise refusal


def revert() -> None:
    """Revert every patch, and log those that other packages have patched over."""
    displaced = transaction.revert_to(0)
    if displaced:
        log.warning(
            "kvpatch: not reverted, because others have patched over them: %s",
            ", ".join(displaced),
        )


def forget_role() -> None:
    """Forget what only the process that this one was forked from is.

    vLLM forks workers from their engine on a GPU, and a worker is in its engine's process where
    the roles say so.
    """
    record.roles, record.elastic, record.layout = [], None, ""


os.register_at_fork(after_in_child=forget_role)


def _stay_refused(error: Exception) -> RefusedImport:
    global _refused
    if not isinstance(error, Refusal):
        error = Refusal(
            "kvpatch could not be applied",
            f"it failed with {type(error).__name__}: {error}",
            "report this with your versions, or set KVPATCH=0",
            code="KVP202",
        )
    _refused = error
    refusal_report.report(error)
    return RefusedImport.of(error)
