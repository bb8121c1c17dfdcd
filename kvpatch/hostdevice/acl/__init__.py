"""An emulated NPU: the calls of Huawei's ACL runtime on the host device's memory. A test device.

Written from the published API reference and the calls of torch_npu (BSD-3-Clause) and vllm-ascend
(Apache-2.0); no line of CANN is in it.
"""
