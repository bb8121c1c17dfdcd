"""What people made of the figures: prose without figures, which docs/numbers.md shows.

TRIED: what was tried where a goal was missed, by the goal's name; shown only while it is.
READ: what a profile showed, by the profile's name.
"""

from __future__ import annotations

TRIED: dict[str, str] = {
    "no reuse, offloading on against off: total tok/s within 1 %": (
        "The figure lies within what equal arms differ by. The fence, measured by itself with far "
        "less noise (below), costs nothing that shows; what is left is the copying of blocks that "
        "nobody asks for again, by the processor that computes. vLLM's own offloading on static "
        "memory pays for it as well. Nothing was changed for it."
    ),
    "returning multi-turn, elastic + offloading against static + offloading: "
    "total tok/s at least 1.00x": (
        "The figure lies within what equal arms differ by; the first repeat, with memory that was "
        "never mapped before, is the slowest of the elastic arms. Nothing was changed for it."
    ),
    "a returning conversation against kvcached alone: median TTFT at most 0.1x": (
        "vLLM's own offloading on static memory takes as long. What is left is the request's way "
        "through the server, the computation of what the turn adds to the conversation, which no "
        "cache can have, and one copy for each block; nothing more was found to leave out."
    ),
}
READ: dict[str, str] = {
    "a step of the engine": (
        "The model is nearly all of it. kvpatch's own code is a fraction of a percent."
    ),
    "the scheduler's part of a step": (
        "The largest part that is not vLLM's own is kvcached asking the device how much memory is "
        "free, in every step. That is kvcached's to change; kvpatch's own code is next to nothing "
        "of it, and was not changed for it."
    ),
    "a large transfer": (
        "It is the host device's pairing of addresses, in Python, a block at a time: about two "
        "microseconds a block, beside the copy. On a GPU the copies are vLLM's own and this code "
        "does not run, so it was left simple."
    ),
}
