"""scripts/matrix: what each release has at the targets of the patches, and its engine runs."""
