"""kvcached's elastic memory on Ascend NPUs: its CUDA calls, made on Huawei's ACL runtime."""
