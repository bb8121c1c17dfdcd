"""A pytest plug-in for kvcached's tests: vLLM has kvcached's patches, with kvpatch's or without.

The host device answers for torch.cuda where kvcached asks it, with its own size. kvcached's tests
put a torch.cuda of theirs in its place, which no machine with a GPU would keep them from; so the
rows of the host device that do this are taken back. All others stay, but for one that is applied to
the same function after one of these.
"""

import os

# The last applied first.
ROWS = (
    "elastic_memory.allocation",
    "host_device.size_for_v2",
    "host_device.release_barrier",
    "host_device.torch",
)


def pytest_configure() -> None:
    """Let the patches be applied, and take those rows back."""
    import vllm  # noqa: F401

    if os.environ["KVPATCH"] != "1":
        return
    from kvpatch.activation import transaction

    for row in ROWS:
        if not transaction.revert(row):
            raise RuntimeError(f"{row} was patched over")
