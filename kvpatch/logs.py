"""``KVPATCH_LOG=debug``: every gate and patch, as it is passed and applied.

kvpatch logs below vLLM's own logger, whose handler drops DEBUG unless the whole of
vLLM is set to it. So kvpatch's DEBUG lines, and only those, get a handler of their own.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import sys

NAME = "KVPATCH_LOG"


def debug_if_asked(logger: logging.Logger) -> None:
    """Print DEBUG lines of ``logger`` when the environment asks for them.

    Called before vllm is imported, and again after: vLLM's logging configuration takes
    the handlers off every logger below its own.
    """
    if os.environ.get(NAME, "").strip().lower() != "debug":
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
