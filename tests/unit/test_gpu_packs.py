"""scripts/gpu without a GPU: what is packed, how it is divided, and that it says so and ends 0."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts/gpu"))

from packing import LISTING, PackError, Part, divide, packed_size, unpack, write

GPU = Path(__file__).parents[2] / "scripts/gpu"


@pytest.fixture
def parts(tmp_path):
    """Five files that do not pack: three of the first stage, two of the second."""
    source = random.Random(1)
    made = []
    for number, size in enumerate((700, 300, 300, 900, 100)):
        path = tmp_path / f"file{number}"
        path.write_bytes(source.randbytes(size * 1024))
        made.append(Part(f"site/file{number}", path, stage=1 if number < 3 else 2))
    return made


def sizes(parts, folder):
    return [(part, packed_size(part, folder)) for part in parts]


def test_the_first_stage_comes_first_and_no_pack_is_too_large(parts, tmp_path):
    limit = 1 << 20
    packs = divide(sizes(parts, tmp_path), limit)
    assert sorted(part.name for pack in packs for part in pack) == [part.name for part in parts]
    stages = [part.stage for pack in packs for part in pack]
    assert stages == sorted(stages)
    for path in write(packs, tmp_path / "packs", limit):
        assert path.stat().st_size <= limit


def test_what_is_packed_comes_out_again(parts, tmp_path):
    packs = divide(sizes(parts, tmp_path), 1 << 20)
    write(packs, tmp_path / "packs")
    assert len(unpack(tmp_path / "packs", tmp_path / "out")) == len(packs)
    for part in parts:
        assert (tmp_path / "out" / part.name).read_bytes() == part.source.read_bytes()


def test_packs_may_follow_one_by_one(parts, tmp_path):
    packs = divide(sizes(parts, tmp_path), 1 << 20)
    written = write(packs, tmp_path / "packs")
    written[-1].unlink()
    assert unpack(tmp_path / "packs", tmp_path / "out") == [path.name for path in written[:-1]]


def test_a_part_that_fits_nowhere_is_named(parts, tmp_path):
    with pytest.raises(PackError, match=r"site/file3 takes 0 MiB and a pack may have 0"):
        divide(sizes(parts, tmp_path), 800 * 1024)


def test_a_damaged_pack_is_not_opened(parts, tmp_path):
    (path, *_) = write(divide(sizes(parts, tmp_path)), tmp_path / "packs")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(PackError, match=r"pack-1.zip is not what was packed"):
        unpack(tmp_path / "packs", tmp_path / "out")


def test_without_packs_it_says_how_they_are_made(tmp_path):
    with pytest.raises(PackError, match="make them with scripts/gpu/pack"):
        unpack(tmp_path, tmp_path / "out")


def test_the_listing_says_which_stages_a_pack_is_for(parts, tmp_path):
    write(divide(sizes(parts, tmp_path), 1 << 20), tmp_path / "packs")
    listing = json.loads((tmp_path / "packs" / LISTING).read_text())
    assert {stage for about in listing.values() for stage in about["stages"]} == {1, 2}


@pytest.fixture
def without_gpu(tmp_path):
    """A PATH in which there is no nvidia-smi."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("bash", "sed", "grep", "dirname", "mkdir", "env"):
        found = next(
            Path(one) / name for one in os.environ["PATH"].split(":") if (Path(one) / name).exists()
        )
        (folder / name).symlink_to(found)
    return {"PATH": str(folder), "OUT": str(tmp_path / "out")}


def run(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [GPU / "run", *words], env=environment, capture_output=True, text=True, check=False
    )


def test_without_a_gpu_it_explains_itself_and_ends_0(without_gpu):
    done = run(without_gpu)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("skipped: this machine has no NVIDIA GPU.")
    assert not Path(without_gpu["OUT"]).exists()


def test_a_stage_that_is_not_there_is_refused(without_gpu):
    done = run(without_gpu, "speed")
    assert done.returncode == 2
    assert done.stderr == ("run: there is no stage speed; there are roundtrips, copies and arms\n")
