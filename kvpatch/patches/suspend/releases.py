"""The first release of vLLM on which an engine can be suspended.

What the rows wrap and what the spills use is the same from 0.30 on. Before it,
SimpleCPUOffloadConnector's ``prepare_store_specs`` returns no events, and the size of
OffloadingConnector's tier has another name. Where engines ran is in the table of ``admitted``.
"""

SINCE = "0.32"
NAME = "idle"  # in that table
