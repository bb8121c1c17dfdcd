"""vLLM's tiers behind the CPU tier, made right on kvcached's memory and on faulty disks."""
