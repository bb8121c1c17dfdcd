"""The compatibility matrix: what kvpatch supports on every release of vLLM, and the evidence.

A cell is one combination of the axes; its verdict is computed by the code that decides at
start-up (the gates, the patches, the rules) and from the recorded runs in ``data``. A cell
that starts without a recorded run is ``UNTESTED``, which no committed matrix contains.

axes        the axes, and the configuration that represents a cell
signatures  the recorded signatures of the patches' targets in each release
evidence    the recorded runs, and the code that they ran on
sharing     the release whose runs of the fence stand for another
verdicts    the verdict of a cell
npu         the verdict of a cell on an Ascend NPU
tables      cells grouped by verdict
"""
