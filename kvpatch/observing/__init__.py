"""What an engine says about itself while it runs: to ``kvpatch status`` and to /metrics.

totals      what the engine's own thread counts, a few additions a step
measure     what can be read of an engine from another thread at any time
page        one process's page in shared memory, private to its user
publish     the thread that keeps the page up to date
reading     finding pages, and what the state of a page says about its process
messages    what rides in vLLM's own stats from an engine to the API servers
prometheus  the ``vllm:kvpatch_`` series of an API server
"""
