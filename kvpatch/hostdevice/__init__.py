"""The host device: kvcached's allocator on host memory, for machines without a GPU.

``python -m kvpatch.hostdevice install`` builds kvcached from its sdist against the
headers in ``include``. ``KVPATCH_HOST_DEVICE=2GiB`` sets the size of the device, which all
processes of this user on the machine share. Nothing here is used on a machine with a GPU.
"""
