"""Classes and modules of vLLM that several rows patch."""

V1_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
V2_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
ENGINE_CORE = "vllm.v1.engine.core:EngineCore"
OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
