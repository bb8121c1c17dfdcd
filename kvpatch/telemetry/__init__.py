"""What a process publishes about itself, and how it is read; imports nothing of vLLM.

status_page  the page of one process in shared memory, private to its user
schema       the types of a page's content
publisher    the thread that keeps the page up to date
reader       finding pages, and deriving the state of a process from its page
refusals     the last refusals of a user, for ``kvpatch status``
printable    text of others, made safe for a terminal
fuse         an error of counting switches counting off, and nothing else
remembered   the blocks that an engine has computed, for hits that it lost
disk         the counts of a secondary tier, on the threads of its disk
counters     the counts of an engine's own thread, a few additions per step
series       the ``vllm:kvpatch_`` series, and the messages that carry them to API servers
prometheus   the series of one API server
follower     the gauges of an API server while no step is made
"""
