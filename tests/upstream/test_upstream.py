"""vLLM's and kvcached's own tests pass with kvpatch as without it, but for those that are listed.

Needs the package index once, for the sources; not in the default run.
"""

import pytest

from harness.upstream import compare, results, runner
from harness.upstream.suites import SUITES


@pytest.mark.parametrize("suite", SUITES, ids=[suite.name for suite in SUITES])
def test_what_passes_without_kvpatch_passes_with_it_or_is_listed(suite, tmp_path):
    off, on = (runner.run(suite, patched, tmp_path / str(patched)) for patched in (False, True))
    wrong = compare.verdict(off.tests, on.tests, results.listed(suite.name))
    assert not wrong, "\n".join(wrong)
