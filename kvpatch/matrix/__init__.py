"""The compatibility matrix: what kvpatch supports on every release of vLLM.

verdicts    the verdict of every cell, a combination of the axes, as recorded
tables      cells grouped by verdict

The evidence and what makes verdicts of it are the repository's: ``scripts/harness/matrix``.
"""
