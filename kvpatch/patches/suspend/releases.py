"""The first release of vLLM on which an engine can be suspended.

Where engines ran is in the table of ``admitted``.
"""

SINCE = "0.28"
NAME = "idle"  # in that table
