"""The host device: kvcached's allocator on host memory, for machines without a GPU.

``KVPATCH_HOST_DEVICE=2GiB`` sets its size; all processes of this user on the machine share it.
"""
