"""``kvpatch verify -- vllm serve ...``: evidence for one command, without vllm in this process."""
