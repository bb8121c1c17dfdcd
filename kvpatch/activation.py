"""Activation: what happens the moment vllm is imported.

The order is fixed here and does not depend on which startup file ran first:
gates that need no import, then kvcached's own patches, then ours over them. A
feature that cannot be applied whole takes every other one back with it.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType, TracebackType

import wrapt

from kvpatch import gate, registry, status
from kvpatch.errors import Refusal
from kvpatch.patch import Outcome, Transaction

transaction = Transaction()
_refused: Refusal | None = None


class _StayRefused:
    """Keeps vllm from being imported a second time past a refusal."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "vllm" and _refused is not None:
            raise _refused


def arm() -> None:
    """Register for vllm's import; called when somebody is about to import it.

    kvcached's hook on vllm may run before ours and reads its switches only then, so
    they are set here. A contradiction is left as it is, for the gate to refuse.
    """
    for name in gate.KVCACHED_SWITCHES:
        os.environ.setdefault(name, "1")
    sys.excepthook = _say_refusals_in_one_line(sys.excepthook)
    wrapt.register_post_import_hook(_on_vllm_imported, "vllm")


def vllm_not_found() -> None:
    """Remember that no vllm was found, for the sentence if the import was not caught."""
    global _vllm_missing
    _vllm_missing = True


_vllm_missing = False


def _on_vllm_imported(module: ModuleType) -> None:
    global _refused
    try:
        activate()
    except Refusal as refusal:
        transaction.revert_to(0)
        _refused = refusal
        sys.meta_path.insert(0, _StayRefused())
        raise


def activate() -> None:
    """Pass every gate and apply every feature, or raise with nothing applied.

    Raises:
        Refusal: a gate said no, or a patch could not be applied.
    """
    gate.check_environment()
    vllm = gate.check_installed("vllm", registry.VLLM_RANGE)
    gate.check_range(vllm, registry.VLLM_RANGE)
    kvcached = gate.check_installed("kvcached", registry.KVCACHED_RANGE)
    gate.check_range(kvcached, registry.KVCACHED_RANGE)
    status.record.vllm = f"{vllm.distribution} {vllm.text}"
    status.record.kvcached = kvcached.text
    if gate.allowed_by_name(vllm) and not gate.in_range(vllm, registry.VLLM_RANGE):
        status.log.warning(
            "kvpatch: %s %s is UNTESTED and runs because %s names it",
            vllm.distribution,
            vllm.text,
            gate.ALLOW_VLLM,
        )

    apply_kvcached()
    for feature in registry.FEATURES:
        verdict = gate.check_feature(feature, vllm, kvcached)
        if verdict.passed:
            try:
                transaction.apply_all(feature.patches)
            except Refusal:
                raise
            except Exception as error:
                verdict = gate.Verdict(Outcome.FAILED, f"{type(error).__name__}: {error}")
        status.record.features[feature.name] = verdict.outcome
        if verdict.outcome not in (Outcome.APPLIED, Outcome.NOT_NEEDED):
            raise Refusal(
                f"the feature {feature.name} cannot be applied ({verdict.outcome.value})",
                verdict.reason,
                "install versions from docs/support.md, or set KVPATCH=0",
            )


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
        ) from error


def _say_refusals_in_one_line(previous: object) -> status.ExceptHook:
    """Return an excepthook that prints an uncaught refusal without a traceback."""

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Refusal):
            sys.stderr.write(f"{error}\n")
            return
        assert callable(previous)
        previous(kind, error, traceback)
        if _vllm_missing and isinstance(error, ModuleNotFoundError) and error.name == "vllm":
            missing = Refusal(
                "vllm is not installed in this environment",
                f"kvpatch is on and runs on vllm {registry.VLLM_RANGE}",
                "install it with pip, or set KVPATCH=0",
            )
            sys.stderr.write(f"{missing}\n")

    return hook
