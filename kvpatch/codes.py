"""The code of every refusal: stable, shown at the end of its sentence, listed in the docs.

A code means one fault for good: it is never given to another one, and a fault that is
gone leaves its number unused. To add a refusal, add a line here and name the code where
it is raised, ``Refusal(what, why, remedy, code="KVP404")`` or ``Rule(..., code=...)``.

    KVP1xx  the installation and the environment
    KVP2xx  the patches
    KVP3xx  the engine's configuration
    KVP4xx  the engine's memory
    KVP5xx  the host device
"""

from __future__ import annotations

UNCODED = "KVP000"

CODES = {
    "KVP101": "`KVPATCH` has a value that kvpatch does not know",
    "KVP102": "kvcached is switched off by one of its own variables",
    "KVP103": "vllm or kvcached is not installed as a distribution",
    "KVP104": "two distributions of one package are installed in different versions",
    "KVP105": "the version of a package is not one by PEP 440",
    "KVP106": "a package is a development build or a pre-release",
    "KVP107": "a package is outside the tested range",
    "KVP108": "kvpatch itself, or wrapt or packaging, cannot be imported",
    "KVP109": "the startup file did not run, so that nothing is patched",
    "KVP110": "kvcached cannot be imported",
    "KVP201": "a feature cannot be applied: its target is missing, moved or out of range",
    "KVP202": "applying the patches failed in a way nobody foresaw",
    "KVP301": "a model runner that was not tried on this release",
    "KVP302": "a KV connector that was never compared",
    "KVP303": "an offloading spec that was never compared",
    "KVP304": "`canonical_layout`",
    "KVP305": "offloading of a model with latent attention (MLA)",
    "KVP306": "offloading with prefix caching off",
    "KVP307": "offloading with parallelism other than tensor parallelism",
    "KVP308": "offloading with an executor other than `uni` and `mp`",
    "KVP309": "offloading with speculative decoding",
    "KVP310": "offloading with a KV cache dtype that was never compared",
    "KVP311": "offloading of a hybrid or encoder-decoder model",
    "KVP312": "HiSparse",
    "KVP313": "a hybrid model on a release and runner where kvcached's patches were not tried",
    "KVP314": "a KV cache layout that kvcached's memory does not have",
    "KVP315": "a `kv_offload_backend` that was never compared",
    "KVP316": "`lazy_offload` on a vLLM that loses lazy copies",
    "KVP317": "a connector on a release or runner on which it was not tried",
    "KVP318": "SimpleCPUOffloadConnector on a device whose copies are unknown",
    "KVP319": "a connector inside MultiConnector that was never compared",
    "KVP320": "a MultiConnector with one connector twice",
    "KVP321": "the `example` tier",
    "KVP322": "a secondary tier that was never compared",
    "KVP323": "secondary tiers with the scheduling policy `priority`",
    "KVP324": "offloading with a scheduler class that is not vLLM's own",
    "KVP325": "KV cache events on a release where elastic memory gives none out",
    "KVP401": "the scheduler's block pool is not kvcached's",
    "KVP402": "a layer's KV cache was allocated outside kvcached's memory",
    "KVP403": "kvcached could not be set up in a worker",
    "KVP404": "kvcached cannot manage the model's KV cache",
    "KVP405": "a layer's KV cache has fewer blocks than the scheduler hands out",
    "KVP406": "a kind of KV cache that was never compared",
    "KVP407": "a block has other bytes in memory than in vLLM's plan",
    "KVP408": "the connector copies memory that is not kvcached's",
    "KVP409": "the connector's CPU blocks are on kvcached's memory",
    "KVP410": "the connector registered other memory than kvcached's regions",
    "KVP411": "the CPU tier has another size in the worker than in the scheduler",
    "KVP412": "a tier is created before the KV cache is described",
    "KVP413": "the CPU tier's shared memory exists already",
    "KVP414": "another engine runs under this one's kvcached name",
    "KVP415": "layers that share their KV cache, on a runner where kvcached cannot have that",
    "KVP501": "no GPU, and kvcached is built for one",
    "KVP502": "the host device has no size",
    "KVP503": "the host device has another size in running processes",
}
