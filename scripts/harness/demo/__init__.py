"""scripts/demo: the same conversations with plain vLLM and on elastic memory."""
