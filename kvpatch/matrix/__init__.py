"""The compatibility matrix: what kvpatch supports on every release of vLLM, as recorded."""
