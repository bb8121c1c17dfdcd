"""The compatibility matrix: its cells on real engines, and the verdicts that their runs give.

A cell is one combination of the axes; its verdict is computed by the code that decides at
start-up (the gates, the patches, the rules) and from the recorded runs in ``docs/results/matrix``.
A cell that starts without a recorded run is ``UNTESTED``, which no committed matrix contains.

axes        the axes, and the configuration that represents a cell
shapes      the recorded signatures of the patches' targets in each release
recorded    the recorded runs, and the code that they ran on
sharing     the release whose runs of the fence stand for another
derive      the verdict of a cell
npus        the verdict of a cell on an Ascend NPU
command     ``scripts/matrix``, which runs cells
"""
