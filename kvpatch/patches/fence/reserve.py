"""How many freed pages stay mapped, because the engine may need them again soon.

Every unmap waits for the computation of all workers, and a page that is mapped again costs a map on
each of them. A load that rises and falls frees pages in one step and maps as many some steps later.
Freed pages can be allocated again as they are, so that those alone go that were free for a while.
"""

from __future__ import annotations

from kvpatch.patches.fence.fence import Retired

STEPS = 64  # in which a page has to be free all the time; a second or two under load
PART = 4  # of the device's free memory no more than one part in so many, which neighbours may want


class Reserve:
    """Decides how many of the freed pages are still wanted; ``kept`` stayed in the last step."""

    def __init__(self) -> None:
        self.kept = 0
        self._least = 0  # freed pages in every step so far
        self._left = STEPS

    def split(self, retired: Retired, most: int) -> tuple[Retired, Retired]:
        """Split freed pages into those that are to go and those that stay; once in each step.

        Args:
            retired: (epoch, page ids), the first freed first.
            most: more than so many do not stay, but all of them go.
        """
        count = sum(len(pages) for _, pages in retired)
        self._least = min(self._least, count)
        self._left -= 1
        due = 0
        if count > most:
            due = count
        elif not self._left:
            due = self._least
        if due or not self._left:
            self._left, self._least = STEPS, count - due
        self.kept = count - due
        return _first(retired, due)


def _first(retired: Retired, due: int) -> tuple[Retired, Retired]:
    """Return the pages that were freed first, so many, and the others."""
    first: Retired = []
    for at, (epoch, pages) in enumerate(retired):
        if due < len(pages):
            parts = [(epoch, pages[:due])] if due else []
            others = [(epoch, pages[due:]) if due else retired[at]]
            return first + parts, others + retired[at + 1 :]
        first.append(retired[at])
        due -= len(pages)
    return first, []
