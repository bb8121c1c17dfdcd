"""The gates that need vllm, checked in a separate interpreter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping

from kvpatch.doctor import interpreter
from kvpatch.doctor.finding import Finding, Topic
from kvpatch.environ import SWITCH

TOPIC = Topic("import of vllm")
SECONDS = 300
PROBE = """
import json, kvpatch, vllm
from kvpatch import activation
from kvpatch.status import record
features = record.describe()["features"]
print("\\n" + json.dumps({"features": features, "patches": len(activation.transaction.applied)}))
"""


def check(settings: Mapping[str, str]) -> list[Finding]:
    """Import vllm with kvpatch on, and report what was applied or the refusal."""
    try:
        on = dict(settings)
        if SWITCH.is_off(settings):
            on[SWITCH.name] = "1"
        done = interpreter.run(sys.executable, PROBE, on, SECONDS)
    except subprocess.TimeoutExpired:
        what = f"vllm was not imported within {SECONDS} s"
        return [TOPIC.problem(what, "import it by hand to see where it waits")]
    if done.returncode:
        last = done.stderr.rstrip().rpartition("\n")[2]
        code = re.search(r"\[(KVP\d+)\]$", last)
        what = last or f"it ended {done.returncode}"
        return [TOPIC.problem(what, code=code[1] if code else "")]
    answer = json.loads(done.stdout.splitlines()[-1])
    features = ", ".join(f"{name} {outcome}" for name, outcome in answer["features"].items())
    return [TOPIC.ok(f"{answer['patches']} patches applied: {features}")]
