"""``vllm serve`` on loopback, for tests over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests

START_SECONDS = 240


def eventually(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Poll ``condition`` until it holds; stats arrive after the answer they belong to."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class Server:
    """One ``vllm serve`` and its children; use as a context manager."""

    def __init__(
        self, model: Path, arguments: dict[str, Any], environment: dict[str, str], folder: Path
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = folder / "serve.log"
        command = [Path(sys.executable).with_name("vllm"), "serve", model]
        command += ["--port", str(self.port), "--host", "127.0.0.1"]
        command += ["--worker-extension-cls", "harness.engines.probe.TransferProbe"]
        for name, value in arguments.items():
            option = "--" + name.replace("_", "-")
            if value is True:
                command.append(option)
            else:
                command += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
        with self.log_path.open("w") as log:
            self.process = subprocess.Popen(
                [str(part) for part in command],
                env=environment | {"VLLM_SERVER_DEV_MODE": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def __enter__(self) -> Server:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(self.log[-4000:])
            try:
                if requests.get(f"{self.url}/health", timeout=1).ok:
                    return self
            except requests.RequestException:
                time.sleep(0.2)  # between polls with a deadline, not for ordering
        self.__exit__()
        raise AssertionError(f"no answer in {START_SECONDS} s\n{self.log[-4000:]}")

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def rpc(self, method: str) -> list[Any]:
        """Call ``method`` of every worker; return their answers."""
        answer = requests.post(f"{self.url}/collective_rpc", json={"method": method}, timeout=60)
        answer.raise_for_status()
        return list(answer.json()["results"])

    def complete(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """Complete one prompt of token ids greedily; return tokens and log-probabilities."""
        answer = requests.post(
            f"{self.url}/v1/completions",
            json={
                "prompt": prompt["tokens"],
                "max_tokens": prompt["max_tokens"],
                "temperature": 0,
                "logprobs": 1,
                "ignore_eos": True,
                "return_token_ids": True,
            },
            timeout=120,
        )
        answer.raise_for_status()
        choice = answer.json()["choices"][0]
        return {
            "tokens": choice["token_ids"],
            "logprobs": choice["logprobs"]["token_logprobs"],
        }

    def metric(self, name: str) -> float:
        """The sum of a Prometheus counter over its labels."""
        lines = requests.get(f"{self.url}/metrics", timeout=10).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
