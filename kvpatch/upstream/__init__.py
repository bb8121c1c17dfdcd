"""Internals of vLLM and kvcached that several features use.

kvcached_api  the only access to kvcached's internals: layout, block views, the page manager
vllm_api      where vLLM's offloading classes are in each release, and chunks of the CPU tier
connectors    KV connectors in a configuration and in an engine
targets       classes and modules that several rows patch
"""
