"""vLLM 0.33's hints (demote, prefetch) reach an engine from Python alone."""

import subprocess

from harness.engines.runs import python_of

# Every file of vLLM's server and of its offline API that knows them, and one that does.
SEEKS = """
from pathlib import Path
import vllm
here = Path(vllm.__file__).parent
knows = {str(one.relative_to(here)) for one in here.rglob("*.py") if "kv_hints" in one.read_text()}
print("v1/request.py" in knows, sorted(one for one in knows if one.startswith("entrypoints/")))
"""


def test_no_request_over_http_has_a_hint():
    told = subprocess.run(
        [python_of("0.33.0"), "-c", SEEKS], capture_output=True, text=True, check=True
    )
    assert told.stdout.split("\n")[-2] == "True []"
