"""scripts/gpu: round trips, copy rates and engine arms on a machine with an NVIDIA GPU."""
