"""Comments on the figures, without figures, which docs/numbers.md shows.

TRIED: what was tried where a goal was missed, by the goal's name; shown only while it is.
READ: what a profile showed, by the profile's name.
"""

from __future__ import annotations

TRIED: dict[str, str] = {
    "no reuse, offloading on against off: total tok/s within 1 %": (
        "The figure is within the noise. The fence, measured by itself with far less noise "
        "(below), has no measurable cost; what is left is the copying of blocks that are never "
        "loaded, by the CPU that also computes. vLLM's own offloading on static memory has the "
        "same cost. Nothing was changed for it."
    ),
    "returning multi-turn, elastic + offloading against static + offloading: "
    "total tok/s at least 1.00x": (
        "The figure is within the noise; the first repeat, with memory that was never mapped "
        "before, is the slowest of the elastic arms. Nothing was changed for it."
    ),
    "a returning conversation against kvcached alone: median TTFT at most 0.1x": (
        "vLLM's own offloading on static memory takes as long. What is left is the server's "
        "overhead per request, the prefill of the turn's new tokens, and one copy per block."
    ),
}
READ: dict[str, str] = {
    "a step of the engine": (
        "Nearly all of it is the model. kvpatch's own code is a fraction of a percent."
    ),
    "the scheduler's part of a step": (
        "The largest part outside vLLM is kvcached's query of the device's free memory in every "
        "step. kvpatch's own code is negligible."
    ),
    "a large transfer": (
        "It is the host device's pairing of addresses, in Python, block by block: about two "
        "microseconds per block, besides the copy. On a GPU the copies are vLLM's own and this "
        "code does not run."
    ),
}
