"""The host pool without vLLM: memory that a user's engines share, committed as it is needed.

memory   a sparse file, whose ranges are committed and punched out
record   how an engine's record is written
ledger   the limit and the records of a user's engines, and the lock on them
member   an engine's part in it
extents  which chunks of a tier can be handed out, what they hold, what may be given back
ranks    asking every worker to register an extent with its device, or to deregister it
keeper   the thread of an engine that commits and gives back
"""
