"""scripts/demo: two models on one device, with plain vLLM and on elastic memory."""
