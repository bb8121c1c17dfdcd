"""Which ACL runtime there is: CANN's, or the emulator's."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from kvpatch import distributions

# CANN's set_env.sh exports the first two; the others are its default places.
_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_PLACES = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
HEADER, LIBRARY = Path("include/acl/acl.h"), Path("lib64/libascendcl.so")
_EMULATOR = "#define KVPATCH_ACL_EMULATOR"  # in the emulator's header


class Runtime(NamedTuple):
    """An installed ACL runtime, with ``include/acl/acl.h``, ``lib64/libascendcl.so`` at home."""

    home: Path
    emulated: bool

    def __str__(self) -> str:
        return f"{'the ACL emulator' if self.emulated else 'CANN'} in {self.home}"


def find(environment: Mapping[str, str] = os.environ) -> Runtime | None:
    """Return the runtime that this machine has, CANN's or an emulator that was built; or None."""
    named = [environment[name] for name in _VARIABLES if environment.get(name)]
    for place in [*named, *_PLACES]:
        home = Path(place)
        if (home / HEADER).is_file() and (home / LIBRARY).exists():
            return Runtime(home, _EMULATOR in (home / HEADER).read_text(errors="replace"))
    return None


def emulator(home: Path | None = None) -> Runtime:
    """Build the emulator, for this environment by default; LookupError if not installed."""
    library = distributions.acl_emulator()
    if library is None:
        raise LookupError(
            "CANN was not found, and the ACL emulator is not installed; source CANN's set_env.sh, "
            "or, to test without an NPU, install kvpatch-hostdevice"
        )
    return Runtime(library.build(home or Path(sys.prefix, "lib", "kvpatch-acl")), True)
