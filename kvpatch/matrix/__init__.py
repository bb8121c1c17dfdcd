"""The compatibility matrix: what every release of vLLM gets from kvpatch, and how it is known.

A cell is one combination of the axes; its verdict is computed from the code that
decides at start-up (the gates, the registry, the configuration rules) and from the
results of runs that are recorded in ``data``. What starts without a recorded run is
``untested``, which no committed state has.
"""
