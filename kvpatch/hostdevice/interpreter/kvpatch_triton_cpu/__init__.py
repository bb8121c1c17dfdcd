"""A Triton backend named "cpu", for Triton's interpreter on machines without a GPU.

vLLM runs Model Runner V2 on a CPU when Triton has a backend of that name; the kernels
themselves run in the interpreter (``TRITON_INTERPRET=1``), which compiles nothing.
A package of its own, because Triton imports it and must not import kvpatch with it.
"""
