"""The releases of vLLM on which an engine can be suspended.

A release enters when its engine tests ran (tests/long/test_suspend.py).
"""

RELEASES = ("0.32.0",)
