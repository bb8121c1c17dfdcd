"""The startup stub: all that kvpatch adds to a Python process that does not use it."""

import os
import sys

OFF_VALUES = ("", "0", "false", "off", "no")  # as in kvpatch.environ, not imported while off


def start() -> None:
    """Import kvpatch if ``KVPATCH`` is set; never break another program."""
    if os.environ.get("KVPATCH", "").strip().lower() in OFF_VALUES:
        return
    try:
        import kvpatch  # noqa: F401
    except (Exception, SystemExit) as error:
        sys.meta_path.insert(0, _RefuseVllm(error))


def verify() -> None:
    """Stop vLLM if ``KVPATCH`` is set and kvpatch was not loaded before vllm.

    vLLM calls this as a plug-in, through its entry point group. It patches and imports
    nothing: it is too late to switch kvpatch on.

    Raises:
        RuntimeError: nothing of vLLM is patched in this process.
    """
    if os.environ.get("KVPATCH", "").strip().lower() in OFF_VALUES:
        return
    activation = sys.modules.get("kvpatch.activation")
    if activation is not None and activation.transaction.applied:
        return
    raise RuntimeError(
        "kvpatch refuses to start vLLM: KVPATCH is set but its startup file did not run in "
        f"{sys.executable}, because it was installed where Python reads none (pip install "
        "--target, a zip file) or Python was started with -S, or KVPATCH was set after Python had "
        "started; install kvpatch into site-packages, or import kvpatch before vllm, or unset "
        "KVPATCH. [KVP109]"
    )


class _RefuseVllm:
    """Stops vllm, and nothing else, if kvpatch itself cannot be imported.

    The module is found and then refused, so that programs can still look up whether vllm
    is installed. The traceback is kept, because it shows the cause.
    """

    def __init__(self, cause: BaseException) -> None:
        self._cause = cause

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != "vllm":
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: object) -> None:
        raise ImportError(
            "kvpatch refuses to start vLLM: KVPATCH is set but kvpatch cannot be imported, "
            f"because of {type(self._cause).__name__}: {self._cause}; "
            "reinstall kvpatch, or unset KVPATCH. [KVP108]"
        ) from self._cause

    def exec_module(self, module: object) -> None:
        """Never called; the import machinery requires the method to exist."""
