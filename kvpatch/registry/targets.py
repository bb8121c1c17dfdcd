"""Classes and modules of vLLM that several rows patch."""

V1_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
ENGINE_CORE = "vllm.v1.engine.core:EngineCore"
COORDINATOR = "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator"
_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1"
OFFLOADING = f"{_CONNECTORS}.offloading"
SIMPLE = "vllm.v1.simple_kv_offload"
SIMPLE_CONNECTOR = f"{_CONNECTORS}.simple_cpu_offload_connector:SimpleCPUOffloadConnector"
