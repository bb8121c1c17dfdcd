"""The CUDA builds of vLLM, torch and kvcached on a machine without a GPU: how far they start."""
