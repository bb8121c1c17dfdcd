"""The releases of vLLM on which an engine can be suspended.

A release enters when its engine tests ran: tests/long/test_suspend.py on the newest one, and
tests/versions/test_suspend_on_releases.py on the others. What the rows wrap and what the spills use
is the same from 0.30 on. Before it, SimpleCPUOffloadConnector's ``prepare_store_specs`` returns no
events, and the size of OffloadingConnector's tier has another name.
"""

# In order, and without gaps: the rows are in force from the first one on.
RELEASES = ("0.32.0", "0.33.0")
SINCE = RELEASES[0].rpartition(".")[0]
