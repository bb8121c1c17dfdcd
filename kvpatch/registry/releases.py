"""The releases that were tested, and therefore start."""

VLLM_RANGE = ">=0.27.0,<=0.32.0,!=0.29.*,!=0.30.*,!=0.31.*"
KVCACHED_RANGE = "==0.1.6"
