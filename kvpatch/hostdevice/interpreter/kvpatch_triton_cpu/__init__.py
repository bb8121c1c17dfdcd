"""A Triton backend named "cpu", for Triton's interpreter on machines without a GPU.

vLLM runs Model Runner V2 on a CPU if Triton has a backend of that name; the kernels
themselves run in the interpreter (``TRITON_INTERPRET=1``), which compiles nothing.
A separate package, so that Triton does not import kvpatch with it.
"""
