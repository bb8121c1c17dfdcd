"""A seeded simulation of an engine with a KV connector on elastic memory, with faults inside.

Everything that decides is real: vLLM's ``EngineCore``, scheduler and connectors, both sides of
them, its CPU and fs tiers, kvcached's block pool and page manager, and all of kvpatch, applied
by its own activation. What a GPU, a driver and an operating system do is simulated, from one
seed: the bytes of blocks, what maps and unmaps pages, workers, copies, the disk's threads and
the clock. So a run is a function of its seed, and is replayed by it.

    story      the tokens of a prompt, and the bytes that its blocks must have
    workers    memory and copies of a rank
    disks      the threads, answers and faults of a disk
    world      the engine, checked after every step
    invariants what must always hold
    play       what users, operators and faults do, by a seed
    mutations  one component broken at a time, for the world to find
"""
