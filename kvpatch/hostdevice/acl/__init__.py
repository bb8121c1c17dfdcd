"""An emulated NPU: the calls of Huawei's ACL runtime on the host device's memory. A test device.

The C++ beside this file becomes ``libascendcl.so``, and has the other names under which torch_npu
and vllm-ascend ask for it. Written from the published API reference and from the calls of torch_npu
(BSD-3-Clause) and vllm-ascend (Apache-2.0); no line of CANN is in it.
"""
