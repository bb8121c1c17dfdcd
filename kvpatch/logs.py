"""kvpatch's logger, and ``KVPATCH_LOG=debug``: every gate and patch as it is applied.

kvpatch's logger is a child of vLLM's, whose handler drops DEBUG unless all of vLLM logs
at that level. So kvpatch's DEBUG lines, and only those, have a handler of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys

from kvpatch import environ

# A child of vLLM's logger: vLLM's logging configuration drops INFO of all other loggers.
log = logging.getLogger("vllm.kvpatch")


def debug_if_asked(logger: logging.Logger = log) -> None:
    """Print DEBUG lines of ``logger`` when the environment requests them.

    Called before vllm is imported and again afterwards: vLLM's logging configuration
    removes the handlers of every child of its logger.
    """
    if environ.LOG.read().lower() != "debug":
        return
    if "vllm" in sys.modules:
        # vLLM configures logging when this module is imported, which may be later.
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
