"""The releases that were tested, and therefore start.

Each by its name: a patch release of one of them is one that nobody has tried.
"""

VLLM_RANGE = (
    "==0.19.1 or ==0.22.1 or ==0.24.0 or ==0.26.0 or ==0.27.1 or ==0.28.0 or ==0.29.0 or "
    "==0.30.0 or ==0.31.0 or ==0.32.0"
)
# Where SimpleCPUOffloadConnector was compared; elsewhere a rule refuses it.
SIMPLE_RANGE = (
    "==0.19.1 or ==0.22.1 or ==0.24.0 or ==0.26.0 or ==0.27.1 or ==0.28.0 or ==0.29.0 or "
    "==0.30.0 or ==0.31.0 or ==0.32.0"
)
KVCACHED_RANGE = "==0.1.6"
# Where tiers and MultiConnector were compared; elsewhere a rule refuses them.
TIERS_RANGE = "==0.28.0 or ==0.29.0 or ==0.30.0 or ==0.31.0 or ==0.32.0"
# Where the KV cache of latent attention (MLA) was compared; elsewhere a rule refuses it.
LATENT_RANGE = "==0.29.0 or ==0.30.0 or ==0.31.0 or ==0.32.0"
# Where the states of hybrid models were compared; elsewhere a rule refuses them.
HYBRID_RANGE = "==0.30.0"
