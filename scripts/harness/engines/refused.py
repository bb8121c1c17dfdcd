"""Starts of vLLM that must be refused, as an operator makes them: what they have in common."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.engines.runs import model_of
from kvpatch.refusal import VERIFIABLE, VERIFY_IT

REFUSES = "kvpatch refuses to start vLLM: "
CLI = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"
SMALL = (
    *("--max-model-len", "2048", "--block-size", "32", "--enforce-eager"),
    *("--dtype", "float32", "--num-gpu-blocks-override", "64", "--port", "0"),
)


class Refused:
    """How a start ended that had to be refused.

    Attributes:
        sentence: the refusal, as the last line on stderr, without vLLM's process prefix and
            without its code, and how to verify it.
        code: the code at its end.
        log: everything that was printed.
    """

    def __init__(self, done: Any) -> None:
        assert done.code != 0, done.out + done.err
        said = re.sub(r"^\(\w+ pid=\d+\) ", "", done.last_line)
        sentence, _, code = said.partition(" [KVP")
        self.code = f"KVP{code.rstrip(']')}" if code else None
        assert (VERIFY_IT in sentence) is (self.code in VERIFIABLE), said
        self.sentence = sentence.replace(VERIFY_IT, "")
        self.log = done.out + done.err


@pytest.fixture(scope="session")
def model() -> Path:
    """The folder of a small model, made once."""
    return model_of("llama")


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of an engine on a host device of its own."""
    device = tmp_path / "device"
    device.mkdir()
    return {
        "KVPATCH": "1",
        "KVPATCH_HOST_DEVICE": "1GiB",
        "KVPATCH_HOST_DEVICE_DIR": str(device),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@pytest.fixture
def start_python(run: Callable[..., Any], machine: dict[str, str]) -> Callable[..., Refused]:
    """Run Python code that must be refused, by an interpreter of choice."""

    def start(code: str, *arguments: str | Path, exe: Path | None = None, **changes: Any) -> Any:
        return Refused(run(exe or sys.executable, "-c", code, *arguments, **machine | changes))

    return start


@pytest.fixture
def start_server(
    run: Callable[..., Any], machine: dict[str, str], model: Path
) -> Callable[..., Refused]:
    """Run ``vllm serve`` on the small model; it must be refused."""

    def start(*flags: str, connector: dict[str, Any] | None = None, **changes: Any) -> Refused:
        command = Path(sys.executable).with_name("vllm")
        if connector is not None:
            flags = (*flags, "--kv-transfer-config", json.dumps({"kv_role": "kv_both"} | connector))
        return Refused(run(command, "serve", model, *SMALL, *flags, **machine | changes))

    return start
