"""The parts of scripts/bench: arms, loads, measuring, pairing, goals, and the page."""
