"""``scripts/recipes``: what kvpatch's rules say of the recipes that vLLM publishes."""
