"""scripts/gpu: the first minutes on a machine with an NVIDIA GPU, which may have no network.

bundle    what such a machine lacks, in parts of a size that can be carried to it
unpack    an environment of each release of vLLM, from the parts
run       the steps, in order of worth

``unpack`` and ``run`` begin where nothing is unpacked: they need the standard library alone.
"""

from pathlib import Path

from harness import ROOT

# Of vLLM, by worth: what runs first, the one made for the machine's torch, the newest.
RELEASES = ("0.32.0", "0.26.0", "0.33.0")
PARTS = ROOT / ".kit"  # where parts are made
KIT = Path("/tmp/kvpatch-kit")  # where they are unpacked, on the machine
