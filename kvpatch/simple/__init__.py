"""SimpleCPUOffloadConnector on kvcached's elastic memory.

The connector keeps a reference to every block that one of its copies names, so that
no page of it is freed before the copy has ended. What it takes for granted beyond
that, kvcached's memory and block pool do not give it, and these modules do.
"""
