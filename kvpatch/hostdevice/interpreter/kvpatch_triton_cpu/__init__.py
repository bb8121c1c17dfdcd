"""A Triton backend "cpu", which vLLM's Model Runner V2 looks for; kernels are interpreted.

A separate package, so that Triton does not import kvpatch with it.
"""
