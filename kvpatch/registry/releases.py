"""The releases that were tested, and therefore start.

Each by its name: a patch release of one of them is one that nobody has tried.
"""

VLLM_RANGE = "==0.28.0 or ==0.30.0 or ==0.32.0"
KVCACHED_RANGE = "==0.1.6"
