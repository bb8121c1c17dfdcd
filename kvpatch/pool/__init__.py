"""The host pool without vLLM: memory that a user's engines share, committed as it is needed."""
