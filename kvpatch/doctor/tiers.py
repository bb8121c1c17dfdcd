"""Secondary tiers: what ``KVPATCH_TIER_SIZE`` would do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvpatch import environ
from kvpatch.doctor.finding import Finding, Topic
from kvpatch.environ import TIER_SIZE
from kvpatch.sizes import readable

TOPIC = Topic("tiers")


def check(settings: Mapping[str, str]) -> Iterator[Finding]:
    """Report the size of the folders of tiers, if one is asked for."""
    text = TIER_SIZE.read(settings)
    try:
        size = environ.share(text) if text else None
    except ValueError:
        return  # reported with the environment
    if size is None:
        return
    most = readable(size.size) if size.size else f"{size.part:.0%} of its file system"
    yield TOPIC.ok(
        f"in the root_dir of every tier fs your engines keep {most} of block files, and of the "
        "disk the smaller of 4 GiB and 5 % free: the oldest by their last use are removed first"
    )
    if size.size and size.size < 1 << 30:
        what = f"{TIER_SIZE} is {readable(size.size)}, which few prompts fill"
        yield TOPIC.warning(what, "set it to the size of a disk's part, for example 500GiB")
