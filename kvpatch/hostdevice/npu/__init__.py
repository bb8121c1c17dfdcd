"""Computation on the emulated NPU, for engines of vllm-ascend on the ACL emulator.

A test device: what it computes is what torch computes on the host, at no speed of any device.
"""
