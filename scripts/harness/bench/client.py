"""``vllm bench serve`` in this process: its import takes as long as a small load."""

from __future__ import annotations

import io
import math
import os
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from harness.bench.loads import Load, write_trace
from harness.bench.sizes import BLOCK_TOKENS
from harness.console import HarnessError
from harness.serve import MODEL_NAME, Server


def arguments(load: Load, trace: Path, server: Server) -> list[str]:
    """Return the command line of ``vllm bench serve`` for one load."""
    options = {
        "backend": "vllm",
        "endpoint": "/v1/completions",
        "host": "127.0.0.1",
        "port": server.port,
        "model": MODEL_NAME,
        "tokenizer": server.model,
        "dataset-name": "timed_trace",
        "dataset-path": trace,
        "timed-trace-chunk-hash-size": BLOCK_TOKENS,
        "num-prompts": len(load.prompts),
        "temperature": 0,
        "ready-check-timeout-sec": 0,
    }
    if math.isfinite(load.rate):
        options["request-rate"] = load.rate
    else:
        options["max-concurrency"] = load.together
    line = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    # Not by the trace's clock.
    return [*line, "--no-self-timed", "--disable-tqdm", "--save-detailed"]


def serve(load: Load, server: Server, folder: Path) -> dict[str, Any]:
    """Send a load to a server; return the result of ``vllm bench serve``.

    Raises:
        HarnessError: a request failed, or generated too few tokens.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    trace = write_trace(load.prompts, folder / "trace.jsonl")
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        result: dict[str, Any] = main(parser.parse_args(arguments(load, trace, server)))
    if result["failed"] or result["completed"] != len(load.prompts):
        errors = [error for error in result["errors"] if error]
        raise HarnessError(
            f"{result['failed']} of {len(load.prompts)} requests failed on {server.name}: "
            f"{(errors or ['no reason given'])[0][-300:]}"
        )
    for got, prompt in zip(result["output_lens"], load.prompts, strict=True):
        if got != prompt.answer:
            raise HarnessError(f"{server.name} answered with {got} of {prompt.answer} tokens")
    return result
