"""What the refusals have in common."""

from __future__ import annotations

REFUSES = "kvpatch refuses to start vLLM: "
CLI = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"
