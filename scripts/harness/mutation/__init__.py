"""scripts/mutate: small faults in the core modules, and the unit tests that notice them."""
