"""scripts/bench: arms, loads, measurements, goals, and the page that is rendered from them."""
