"""What only contributors run: engines on the host device, the demo, benchmarks, the matrix, docs.

An editable install puts ``scripts`` on the path, so that this is ``import harness``. The
commands in ``scripts`` are thin: each runs one module of this package.
"""
