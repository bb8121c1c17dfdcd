"""Engines on the host device: the runs of the tests and of the matrix, and what judges them.

``runs`` says what an engine is and what it is asked; ``process`` starts it, as a fork of a
process that has imported what vLLM imports. The drivers run in that process.
"""
