"""The releases that were tested, and therefore start."""

VLLM_RANGE = "==0.28.0"
KVCACHED_RANGE = "==0.1.6"
