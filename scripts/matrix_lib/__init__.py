"""Recomputing the compatibility matrix: sources, shapes, environments and engines."""
