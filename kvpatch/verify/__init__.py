"""``kvpatch verify -- vllm serve ...``: evidence for one command on this machine.

Nothing of vllm, torch or kvcached is imported here. ``kvpatch.verdicts`` has what a run leaves.
"""
