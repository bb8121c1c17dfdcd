"""Where kvpatch is installed from its wheels, no process takes it from the checkout.

``python -m`` puts the folder that it runs in first, and in the checkout that has a kvpatch. What
it tests would not be what is released.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

CHECKOUT = os.path.realpath(__file__).rsplit("/", 4)[0]


class FromWheels:
    """Finds kvpatch everywhere but in the checkout."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the installed kvpatch; None for other modules."""
        if name != "kvpatch":
            return None
        return PathFinder.find_spec(
            name, [one for one in sys.path if os.path.realpath(one) != CHECKOUT]
        )


sys.meta_path.insert(0, FromWheels())
