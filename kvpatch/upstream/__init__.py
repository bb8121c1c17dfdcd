"""What kvpatch knows of vLLM's and kvcached's internals, beyond the rows of one feature.

kvcached_api  the one seam to kvcached's internals: layout, block views, the page manager
vllm_api      where vLLM's offloading classes are in each release, and chunks of the CPU tier
connectors    KV connectors in a configuration and in an engine
targets       classes and modules that several rows patch
"""
