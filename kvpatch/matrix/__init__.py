"""The compatibility matrix: what kvpatch supports on every release of vLLM, and the evidence.

A cell is one combination of the axes; its verdict is computed from the code that
decides at start-up (the gates, the patches, the rules) and from the results of runs that
are recorded in ``data``. What starts without a recorded run is ``UNTESTED``, which no
committed state has.

axes        the axes, and the configuration that stands for a cell
signatures  what each release has at the targets of the patches
evidence    the recorded runs, and which code they ran on
verdicts    the verdict of a cell
tables      cells with the same verdict, together
"""
