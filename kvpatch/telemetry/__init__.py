"""What a process publishes about itself, and how it is read: no vLLM in here.

status_page  one process's page in shared memory, private to its user
publisher    the thread that keeps the page up to date
reader       finding pages, and what the state of a page says about its process
refusals     the last refusals of a user, for ``kvpatch status``
counters     what an engine's own thread counts, a few additions per step
series       the ``vllm:kvpatch_`` series, and the messages that carry them to API servers
prometheus   the series of one API server
"""
