"""The compatibility matrix: its cells on real engines."""
