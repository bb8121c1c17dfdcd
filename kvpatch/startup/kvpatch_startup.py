"""The startup stub: the only thing kvpatch adds to a Python that does not use it."""

import os
import sys


def start() -> None:
    """Import kvpatch when ``KVPATCH`` asks for it; never disturb another program."""
    if os.environ.get("KVPATCH", "").strip() in ("", "0"):
        return
    try:
        import kvpatch  # noqa: F401
    except Exception as error:
        sys.meta_path.insert(0, _RefuseVllm(error))


class _RefuseVllm:
    """Stops vllm, and nothing else, when kvpatch itself cannot be imported."""

    def __init__(self, cause: Exception) -> None:
        self.cause = cause

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "vllm":
            raise ImportError(
                f"kvpatch refuses to start vLLM: KVPATCH is set but kvpatch cannot be imported "
                f"({self.cause}); reinstall kvpatch or unset KVPATCH"
            )
