"""What the engine and its workers say of themselves: status pages, audits, vLLM's metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpatch.patches.debug import journal
from kvpatch.telemetry import reader
from kvpatch.verify.child import Unfinished

COMBINATION = "combination.json"
LIFTED = "lifted"


class Readings:
    """One run's readings, in the folder where the processes of the command leave them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def engine(self) -> dict[str, Any]:
        """Return the state of the only engine, from its status page, or raise Unfinished."""
        pages = [seen.page for seen in reader.all_of(False) if seen.page is not None]
        found: list[dict[str, Any]] = [
            page.content["engine"] for page in pages if page.content.get("engine")
        ]
        if len(found) != 1:
            raise Unfinished(f"{len(found)} engines publish their state, and one is expected")
        return found[0]

    def audits(self) -> list[dict[str, int]]:
        """Return the blocks that each worker has checked, by what was done with them."""
        return journal.read(self._folder)

    def combination(self) -> dict[str, Any]:
        """Return what ran, as the frontend wrote it; empty if it came not as far."""
        path = self._folder / COMBINATION
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        return found

    def lifted(self) -> list[str]:
        """Return the codes of the refusals that were lifted, in every process."""
        path = self._folder / LIFTED
        return sorted(set(path.read_text().split())) if path.exists() else []


def total(exposition: str, name: str, **labels: str) -> float:
    """Return the sum of a series of a server's metrics; 0 without one."""
    # vLLM requires it; kvpatch by itself does not.
    from prometheus_client.parser import text_string_to_metric_families

    return sum(
        sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def mapped(engine: Mapping[str, Any]) -> int:
    """Return the pages that an engine uses."""
    return int(engine["device"]["mapped_pages"])
