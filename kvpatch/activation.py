"""Activation: what happens before and after vllm's own code runs.

The order is fixed here and does not depend on which startup file ran first: gates
that need no import, vllm, kvcached's patches, everybody else's hooks on vllm, then
our patches over all of them. What cannot be applied whole is taken back whole.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import wrapt

from kvpatch import gate, instance, logs, refusing, registry, status
from kvpatch.errors import Refusal, RefusedImport
from kvpatch.patch import Outcome, Transaction
from kvpatch.versions import Installed

transaction = Transaction()
_refused: Refusal | None = None


def before_vllm() -> None:
    """Pass the gates that need no import, and switch kvcached on.

    Raises:
        RefusedImport: a gate said no, now or at an earlier import of vllm.
    """
    refusing.in_one_line()
    logs.debug_if_asked(status.log)
    if _refused is not None:
        raise RefusedImport.of(_refused)
    try:
        check_versions()
    except Refusal as refusal:
        raise _stay_refused(refusal) from refusal.__cause__
    instance.give_name()
    status.log.debug("kvpatch: the gates before vllm are passed")
    for name in gate.KVCACHED_SWITCHES:
        if not os.environ.get(name):
            os.environ[name] = "1"


def after_vllm(module: ModuleType) -> None:
    """Apply kvcached's patches and ours to vllm, which has just been executed.

    Raises:
        RefusedImport: one of ours cannot be applied; none is in force then.
    """
    if transaction.applied:
        return  # the inner one of two loaders did it, or vllm is reloaded
    try:
        logs.debug_if_asked(status.log)
        apply_features(before_kvcached=True)
        apply_kvcached()
        # The hooks of others, and kvcached's again if its module was imported before
        # vllm: what a hook patches after us would go over our patches.
        wrapt.notify_module_loaded(module)
        apply_features()
    except Exception as error:
        take_back()
        refusing.forget_submodules()
        raise _stay_refused(error) from error


def check_versions() -> tuple[Installed, Installed]:
    """Pass the environment, metadata and range gates; return vllm and kvcached.

    Raises:
        Refusal: one of them said no.
    """
    gate.check_environment()
    vllm = gate.check_installed("vllm", registry.VLLM_RANGE)
    gate.check_range(vllm, registry.VLLM_RANGE)
    kvcached = gate.check_installed("kvcached", registry.KVCACHED_RANGE)
    gate.check_range(kvcached, registry.KVCACHED_RANGE)
    return vllm, kvcached


def apply_kvcached() -> None:
    """Let kvcached patch vllm now, if its own hook has not done so yet.

    kvcached's hook does the same import, so that only one of the two does work.

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


def apply_features(before_kvcached: bool = False) -> None:
    """Apply every feature of the registry that this machine needs.

    Args:
        before_kvcached: whether kvcached has yet to patch vllm.

    Raises:
        Refusal: a feature is needed and cannot be applied.
    """
    vllm, kvcached = check_versions()
    status.record.vllm = f"{vllm.distribution} {vllm.text}"
    status.record.kvcached = kvcached.text
    if not before_kvcached and not gate.in_range(vllm, registry.VLLM_RANGE):
        status.log.warning(
            "kvpatch: %s %s is UNTESTED and runs because %s names it",
            vllm.distribution,
            vllm.text,
            gate.ALLOW_VLLM,
        )
    for feature in registry.FEATURES:
        if feature.before_kvcached is not before_kvcached:
            continue
        verdict = gate.check_feature(feature, vllm, kvcached)
        if verdict.passed:
            try:
                rows = gate.rows(feature, vllm, kvcached)
                transaction.apply_all(rows)
                for patch in rows:
                    status.log.debug("kvpatch: applied %s to %s", patch.id, patch.target)
            except Exception as error:
                verdict = gate.Verdict(Outcome.FAILED, f"{type(error).__name__}: {error}")
        status.record.features[feature.name] = verdict.outcome
        status.log.debug(
            "kvpatch: feature %s %s %s", feature.name, verdict.outcome.value, verdict.reason
        )
        refusal = gate.refusal(feature, verdict)
        if refusal is not None:
            raise refusal


def take_back() -> None:
    """Revert everything, and say which patches lie under somebody else's."""
    displaced = transaction.revert_to(0)
    if displaced:
        status.log.warning(
            "kvpatch: not reverted, because others have patched over them: %s",
            ", ".join(displaced),
        )


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
    return RefusedImport.of(error)
