"""A cut of scripts/soak, which has 20 minutes: everything that frees blocks, in debug mode."""

import pytest


@pytest.mark.timeout(900)
def test_a_cut_of_it_leaves_nothing_wrong_and_nothing_behind(reported):
    synchronous, asynchronous = reported("harness.soak", "--minutes", "0.67")["runs"]
    assert (synchronous["asynchronous"], asynchronous["asynchronous"]) == (False, True)
    for run in (synchronous, asynchronous):
        assert run["wrong"] == []
        assert set(run["left"].values()) == {0}
        (checked,) = run["checked"]
        assert checked["stored"] > 0
        assert checked["loaded"] > 0
        assert run["fence"]["released"] > 0
        assert run["counts"]["neighbours"] > 0
        assert run["counts"]["holds"] > 0
