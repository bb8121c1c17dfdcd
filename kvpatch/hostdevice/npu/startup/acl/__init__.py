"""What vllm-ascend takes from pyACL, which is part of CANN and on no index, on the emulator."""
