"""The step ``copies``: an engine's rates against plain copies of as many blocks, one by one."""

import json
from pathlib import Path

from harness import pinned
from harness.gpu.seen import Job, Seen

BLOCKS = 4096
FROM = "first-tokens"


def run(job: Job, seen: Seen) -> None:
    """Measure plain copies of blocks as large as an engine's, whose rates a step before noted."""
    found = Path(job.output, f"{FROM}.json")
    moved = json.loads(found.read_text())["facts"].get("moved") if found.exists() else None
    if not moved:
        seen.miss(f"the step {FROM} noted no rates")
        return
    copies = []
    for one in moved:
        asked = {"bytes": one["block_bytes"], "blocks": BLOCKS, "way": one["direction"]}
        share = one["gb_per_second"] / pinned.copy(asked)["gb_per_second"]
        copies.append(one | {"share_of_ceiling": round(share, 4)})
        seen.right.append(
            f"{one['connector']}, {one['direction']}: {one['gb_per_second']} GB/s, {share:.1%} of "
            "pinned copies"
        )
    seen.note(copies=copies)
