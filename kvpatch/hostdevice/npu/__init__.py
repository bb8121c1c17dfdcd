"""Computation on the emulated NPU, a test device: what torch computes on the host."""
