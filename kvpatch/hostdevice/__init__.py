"""A machine without a GPU as the device: kvcached's allocator on ordinary memory.

``python -m kvpatch.hostdevice install`` builds kvcached from its sdist against the
headers in ``include``. ``KVPATCH_HOST_DEVICE=2GiB`` sizes the device, which every
process of this user on the machine shares. Nothing here is used on a GPU machine.
"""
