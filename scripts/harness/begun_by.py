"""Which files of tests begin in time: a pytest plug-in, ``-p harness.begun_by --begun-by SECONDS``.

``.ci/run`` may take 90 minutes, and a machine under load takes three times as long as another. A
file that has not begun within the seconds is skipped, and the run says which: what it found until
then is worth more than a run that is cut.
"""

import time
from typing import Any

import pytest

_OPTION = "begun_by"
_LATE = "NOT RUN, as its file did not begin in time"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--begun-by", type=float, metavar="SECONDS", help="skip files after that")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count where a run begins, for all processes of xdist the same."""
    if config.getoption(_OPTION) is not None:
        given = getattr(config, "workerinput", {})
        until = given.get(_OPTION, time.time() + config.getoption(_OPTION))
        config.pluginmanager.register(_Files(until))


class _Files:
    def __init__(self, until: float) -> None:
        self._until = until
        self._begun: dict[str, bool] = {}

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[_OPTION] = self._until

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        file = item.nodeid.partition("::")[0]
        if not self._begun.setdefault(file, time.time() <= self._until):
            pytest.skip(_LATE)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        skipped = terminalreporter.stats.get("skipped", ())
        late = {one.nodeid.partition("::")[0] for one in skipped if _LATE in str(one.longrepr)}
        for file in sorted(late):
            terminalreporter.write_line(
                f"NOT RUN: {file}, as this machine is slow; it is run by: pytest {file}"
            )
