"""vLLM's and kvcached's own tests, without kvpatch and with it.

Unit tests of the parts that kvpatch patches, from the sources as they are published. A test that
passes without kvpatch and fails with it has a cause, or kvpatch has a fault.
"""

# The file of a run's outcomes, an environment variable of its process.
OUTCOMES = "UPSTREAM_OUTCOMES"
