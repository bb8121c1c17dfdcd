"""kvpatch's logger, and ``KVPATCH_LOG=debug``: every gate and patch as it is applied.

kvpatch logs below vLLM's own logger, whose handler drops DEBUG unless the whole of
vLLM is set to it. So kvpatch's DEBUG lines, and only those, get a handler of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys

from kvpatch import environ

# A child of vLLM's logger: vLLM's logging configuration drops INFO of any other name.
log = logging.getLogger("vllm.kvpatch")


def debug_if_asked(logger: logging.Logger = log) -> None:
    """Print DEBUG lines of ``logger`` when the environment requests them.

    Called before vllm is imported, and again after: vLLM's logging configuration removes
    the handlers of every logger below its own.
    """
    if environ.LOG.read().lower() != "debug":
        return
    if "vllm" in sys.modules:
        # It configures when it is imported, which may not have happened yet.
        with contextlib.suppress(ImportError):
            importlib.import_module("vllm.logger")
    if logger.handlers:
        return
    logger.setLevel(logging.DEBUG)
    if os.environ.get("VLLM_LOGGING_LEVEL", "").strip().upper() == "DEBUG":
        return  # vLLM's own handler prints them
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter("%(levelname)s %(asctime)s [pid %(process)d] %(message)s")
    )
    handler.addFilter(lambda record: record.levelno < logging.INFO)
    logger.addHandler(handler)
