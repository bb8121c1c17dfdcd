"""The releases that were tested, and therefore start.

Each by its name: a patch release of one of them is one that nobody has tried.
"""

RELEASES = (
    "0.16.0",
    "0.19.1",
    "0.22.1",
    "0.24.0",
    "0.26.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
)


def _since(first: str) -> str:
    """Return the range of the tested releases from one on."""
    return " or ".join(f"=={release}" for release in RELEASES[RELEASES.index(first) :])


VLLM_RANGE = _since("0.16.0")
KVCACHED_RANGE = "==0.1.6"
# Where a feature was compared; elsewhere a rule refuses it.
SIMPLE_RANGE = _since("0.19.1")
MULTI_RANGE = _since("0.22.1")
TIERS_RANGE = _since("0.24.0")
# Where the KV cache of latent attention (MLA) was compared.
LATENT_RANGE = _since("0.29.0")
# Where the states of hybrid models were compared.
HYBRID_RANGE = "==0.30.0"
# Where Model Runner V1 was compared although kvcached adapts V2 only.
V1_ON_LATER = _since("0.29.0")
