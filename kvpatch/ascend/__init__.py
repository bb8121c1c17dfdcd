"""kvcached's elastic memory on Ascend NPUs.

``python -m kvpatch.ascend install`` builds kvcached from its sdist with the headers in ``include``,
which make its CUDA calls on Huawei's ACL runtime. kvcached has no NPU backend, and refuses to be
built without CUDA or ROCm.
"""
