"""How a long command ends: done, failed in a sentence, or interrupted."""

from __future__ import annotations

from collections.abc import Callable

from demo_lib.interrupts import Interrupted, interrupts
from demo_lib.options import DemoError
from demo_lib.screen import Screen


def run(screen: Screen, work: Callable[[], int], started: str) -> int:
    """Do ``work`` under our signals, close the screen, and return the exit status.

    Args:
        started: what has been stopped after an interruption.
    """
    interrupts.install()
    try:
        return work()
    except DemoError as error:
        screen.fail(str(error))
        return 1
    except Interrupted as interrupted:
        screen.fail(f"Interrupted by {interrupted}; everything {started} has been stopped.")
        return 128 + interrupted.signum
    finally:
        screen.close()
