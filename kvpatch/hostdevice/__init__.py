"""The host device: kvcached's allocator on host memory, for machines without a GPU."""
