"""scripts/bench: arms, loads, measurements, and the page that is rendered from them."""
