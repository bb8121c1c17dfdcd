"""The machine of an operator who verifies a command: a model, a device, a home, and the command."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.engines.runs import Device, Run
from kvpatch.environ import LOG

# Refused until it is verified, with [KVP324].
FLAGS = {
    "max-model-len": "4096",
    "max-num-seqs": "8",
    "block-size": "32",
    "kv-offloading-size": "1",
    "scheduler-cls": "harness.engines.own_scheduler.OwnScheduler",
}


def environment_of(device: Device, home: Path) -> dict[str, str]:
    """Return the operator's environment: a device, and a home for verdicts."""
    environment = {**os.environ, **device.environ(Run()), "XDG_DATA_HOME": str(home)}
    environment.pop("TORCHDYNAMO_DISABLE", None)
    return environment


class Machine:
    """A model, and an environment with a host device and a home of its own."""

    def __init__(
        self, model: Path, environment: dict[str, str], folder: Path, flags: dict[str, str]
    ) -> None:
        self.model, self.environment, self.folder, self.flags = model, environment, folder, flags
        self.ran = 0

    def command(self, **flags: str) -> list[str]:
        """Return the command of an operator."""
        command = [sys.executable, str(Path(sys.executable).with_name("vllm")), "serve"]
        command += [str(self.model), "--enforce-eager"]
        for name, value in (self.flags | flags).items():
            command += [f"--{name}", value]
        return command

    def kvpatch(self, *words: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run kvpatch's command."""
        return subprocess.run(
            [sys.executable, "-m", "kvpatch", *words],
            env={**self.environment, "KVPATCH": "0", **changes},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )

    def verify(self, **changes: str) -> subprocess.CompletedProcess[str]:
        """Verify the command."""
        self.ran += 1
        logs = self.folder / f"logs-{self.ran}"
        return self.kvpatch("verify", "--logs", str(logs), "--", *self.command(), **changes)

    def find_the_wrong(self, plugged: str, code: str) -> None:
        """Verify the command with loads that bring wrong bytes: that is found, and lifts nothing.

        Args:
            plugged: the folder of ``plugins.flip_loaded_bits``.
            code: that refuses the command.
        """
        done = self.verify(PYTHONPATH=os.pathsep.join((plugged, self.environment["PYTHONPATH"])))
        assert done.returncode == 1, done.stdout
        assert re.search(
            "WRONG    kvpatch KVPATCH_DEBUG: a load brought other bytes than were stored: "
            r"block \d+ of page \d+, job \d+, request ",
            done.stdout,
        ), done.stdout
        assert f"[{code}]" in self.configure()

    def is_verified(self, code: str) -> dict[str, Any]:
        """Verify a command that a code refuses, and starts from then on; return the verdict."""
        refused = self.configure()
        assert f"[{code}]" in refused
        assert "kvpatch verify -- COMMAND" in refused
        done = self.verify()
        assert done.returncode == 0, done.stdout
        assert f"lifted: {code}" in done.stdout
        verdict = Path(re.findall(r"^verdict: (.+)", done.stdout, re.MULTILINE)[0])
        found: dict[str, Any] = json.loads(verdict.read_text())
        assert found["verdict"] == "right"
        assert found["measured"]["blocks loaded"] > 0
        assert "; verified here on " in self.configure()
        return found

    def configure(self, **flags: str) -> str:
        """Return what the command prints as far as its configuration, which decides."""
        code = (
            "import sys\nfrom vllm.engine.arg_utils import AsyncEngineArgs as Args\n"
            "from vllm.usage.usage_lib import UsageContext\n"
            "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser\n"
            "parsed = Args.add_cli_args(Parser()).parse_args(['--model', *sys.argv[1:]])\n"
            "args = Args.from_cli_args(parsed)\n"
            "args.create_engine_config(UsageContext.OPENAI_API_SERVER)"  # as vllm serve does
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *self.command(**flags)[3:]],
            env={**self.environment, "KVPATCH": "1", LOG.name: "debug"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
        return done.stdout
