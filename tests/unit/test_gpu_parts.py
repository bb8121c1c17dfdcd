"""scripts/gpu bundle and unpack: parts, sums, damage, and the environment on the machine."""

import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from harness import ROOT
from harness.console import HarnessError
from harness.gpu import archives, fatbin, parts, unpack

ROOM = 100
SIZE = parts.ROOM_FOR_SUMS + ROOM
RELEASE = unpack.RELEASES[0]


@pytest.fixture
def file(tmp_path):
    def file(name, size):
        path = tmp_path / name
        path.write_bytes(bytes(number % 251 for number in range(size)))
        return path

    return file


def names(planned):
    return [[piece.name for piece in part] for part in planned]


def test_every_group_begins_a_part_and_a_file_goes_on_in_the_next(file):
    one, two, three, none = file("one", 60), file("two", 190), file("three", 10), file("none", 0)
    assert names(parts.planned([[one, none, two], [three]], SIZE)) == [
        ["one", "none", "two.1of3"],
        ["two.2of3"],
        ["two.3of3"],
        ["three"],
    ]


def test_a_part_is_as_large_as_asked_and_no_larger(file, tmp_path):
    planned = parts.planned([[file("one", 60), file("two", 190)]], SIZE)
    for number, pieces in enumerate(planned):
        parts.write(pieces, tmp_path / str(number))
        assert sum(path.stat().st_size for path in (tmp_path / str(number)).iterdir()) <= SIZE
    assert sum(piece.end - piece.begin for piece in planned[0]) == ROOM


def test_a_size_without_room_is_refused(file):
    with pytest.raises(HarnessError, match="parts of 4096 bytes are too small; 4097 is the least"):
        parts.planned([[file("one", 1)]], parts.ROOM_FOR_SUMS)


def test_pieces_are_put_together_once_all_are_there(file, tmp_path):
    whole = file("file", 250)
    here = tmp_path / "here"
    here.mkdir()
    for number, pieces in enumerate(parts.planned([[whole]], SIZE)):
        parts.write(pieces, tmp_path / str(number))
        for name in parts.read_sums(tmp_path / str(number) / parts.SUMS):
            (here / name).write_bytes((tmp_path / str(number) / name).read_bytes())
        assert parts.join(here) == (["file"] if number < 2 else [])
    assert [path.name for path in here.iterdir()] == ["file"]
    assert (here / "file").read_bytes() == whole.read_bytes()


def test_the_sums_are_those_of_sha256sum(file, tmp_path):
    parts.write(parts.planned([[file("one", 60)]], SIZE)[0], tmp_path / "part")
    command = ["sha256sum", "--check", parts.SUMS]
    assert subprocess.run(command, cwd=tmp_path / "part", check=False).returncode == 0


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda part: damage(part / "one"), "one is damaged: its sum is not the one in"),
        (lambda part: (part / "one").unlink(), "one is missing"),
        (lambda part: (part / parts.SUMS).unlink(), "SHA256SUMS cannot be read"),
        (lambda part: (part / parts.SUMS).write_text("none"), "has a line that is no sum: 'none'"),
    ],
)
def test_damage_is_found(file, tmp_path, how, words):
    part = tmp_path / "part"
    parts.write(parts.planned([[file("one", 60)]], SIZE)[0], part)
    parts.check(part, part / parts.SUMS)
    how(part)
    with pytest.raises(parts.Damaged, match=words):
        parts.check(part, part / parts.SUMS)


def container(*entries):
    body = b"".join(
        struct.pack("<HHIQ", kind, 0, 64, len(code)).ljust(28, b"\0")
        + struct.pack("<I", architecture).ljust(36, b"\0")
        + code
        for kind, architecture, code in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def library(*containers):
    """An ELF file with a section for the names of sections, and one of containers."""
    fat, texts = b"".join(containers), b"\0.names\0.nv_fatbin\0"
    begin = 64
    headers = [(0,) * 6, (1, 3, 0, 0, begin, len(texts))]
    headers.append((8, 1, 0, 0, begin + len(texts), len(fat)))
    table = begin + len(texts) + len(fat)
    head = bytearray(64)
    struct.pack_into("<Q", head, 0x28, table)
    struct.pack_into("<HHH", head, 0x3A, 64, len(headers), 1)
    packed = (struct.pack("<IIQQQQ", *one).ljust(64, b"\0") for one in headers)
    return bytes(head) + texts + fat + b"".join(packed)


PTX, CODE = 1, 2


def test_machine_code_of_the_device_is_kept_and_else_the_newest_ptx_that_it_runs():
    made = library(
        container((CODE, 80, b"a" * 8), (CODE, 90, b"b" * 8), (PTX, 80, b"c" * 8)),
        container((PTX, 75, b"d" * 8), (PTX, 80, b"e" * 8), (PTX, 100, b"f" * 8)),
        container((CODE, 100, b"g" * 8)),
    )
    spans = fatbin.others(made)
    assert [chr(made[begin]) for begin, _ in spans] == list("acdfg")
    left = fatbin.blanked(made, spans)
    assert len(left) == len(made)
    assert [one for one in b"abcdefg" if bytes([one]) * 8 in left] == list(b"be")


def test_an_entry_that_is_not_understood_is_not_guessed_at():
    with pytest.raises(HarnessError, match="is not understood \\(kind 7\\)"):
        fatbin.others(library(container((7, 90, b"a" * 8))))


@pytest.fixture
def kit(tmp_path):
    """Parts of a made-up release, and where they are unpacked."""
    tree = tmp_path / "tree"
    kernels = tree / "vllm/kernels.so"
    kernels.parent.mkdir(parents=True)
    (tree / "vllm/__init__.py").write_text("import behind\ndef main(): print(behind.WORD)\n")
    whole = library(container((CODE, 80, b"a" * 8), (CODE, 90, b"b" * 8)))
    spans = fatbin.others(whole)
    kernels.write_bytes(whole)
    described = {"in": "vllm/kernels.so", "sha256": parts.digest(kernels), "spans": spans}
    kernels.write_bytes(fatbin.blanked(whole, spans))
    entry = tree / "vllm-0.dist-info"
    entry.mkdir()
    (entry / "entry_points.txt").write_text("[console_scripts]\nvllm = vllm:main\n[other]\na=b\n")
    made = tmp_path / "made"
    made.mkdir()
    archives.pack(tree, made / f"vllm-{RELEASE}{archives.ENDING}")
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "behind.py").write_text("WORD = 'of the parts'\n")
    archives.pack(shared, made / f"packages{archives.ENDING}")
    original = tmp_path / "original"
    original.mkdir()
    (original / "spans.json").write_text(json.dumps(described))
    (original / "bytes").write_bytes(b"".join(whole[at : at + size] for at, size in spans))
    archives.pack(original, made / f"original-{RELEASE}{archives.ENDING}")
    with zipfile.ZipFile(made / "kvpatch-0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("kvpatch.py", "")
    last = sorted(made.glob("original-*"))
    serving = [path for path in sorted(made.iterdir()) if path not in last]
    # So small that most files are cut.
    for number, pieces in enumerate(parts.planned([serving, last], parts.ROOM_FOR_SUMS + 300), 1):
        parts.write(pieces, tmp_path / f"part{number}")
    return Kit(tmp_path, whole)


class Kit:
    def __init__(self, folder, whole):
        self.folder, self.whole = folder, whole
        self.parts = sorted(folder.glob("part*"), key=lambda part: int(part.name[4:]))
        self.environment = folder / f"kit/vllm-{RELEASE}"

    @property
    def library(self):
        return next(self.environment.glob("lib/python*/site-packages/vllm/kernels.so"))

    def unpack(self, *folders):
        """Unpack with a Python that has the standard library alone, in a PATH without anything."""
        command = [sys.executable, "-S", ROOT / "scripts/gpu", "unpack", *folders]
        return subprocess.run(
            [*map(str, command), "--kit", str(self.folder / "kit")],
            env={"PATH": "", "HOME": str(self.folder)},
            capture_output=True,
            text=True,
            check=False,
        )


def test_an_environment_is_made_of_the_parts(kit):
    *serving, _ = kit.parts
    assert len(serving) > 2
    done = kit.unpack(*kit.parts)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("every sum is right") == len(kit.parts)
    assert kit.library.read_bytes() == kit.whole
    (python,) = unpack.environments(kit.folder / "kit")
    assert subprocess.check_output([python.with_name("vllm")], text=True) == "of the parts\n"
    ask = [python, "-c", "print(__import__('kvpatch').__file__)"]
    where = subprocess.check_output(ask, text=True, cwd=kit.folder, env={})
    assert Path(where.strip()).is_relative_to(kit.environment)


def test_behind_it_is_what_this_python_has(kit):
    assert unpack.main(kit.parts, kit.folder / "kit", print) == 0
    (startup,) = kit.environment.glob("lib/python*/site-packages/00-behind.pth")
    own = [path for path in sys.path if path.endswith("site-packages")]
    assert own
    assert startup.read_text().splitlines() == [str(kit.folder / "kit/packages"), *own]


def test_parts_may_come_one_by_one_and_again(kit):
    for number, part in enumerate(kit.parts, 1):
        done = kit.unpack(part)
        if number == 1:
            assert done.returncode == 1
            assert "these parts have no release of vLLM; begin with part 1" in done.stderr
            assert "waits for the parts that have the rest of it" in done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    assert kit.library.read_bytes() == kit.whole
    assert kit.unpack(kit.parts[0]).returncode == 0


def test_a_damaged_part_ends_with_status_9(kit):
    damage(next(path for path in kit.parts[0].iterdir() if path.name != parts.SUMS))
    done = kit.unpack(*kit.parts)
    assert done.returncode == 9
    assert done.stderr.startswith("scripts/gpu unpack: ")
    assert done.stderr.count("\n") == 1
    assert "is damaged: its sum is not the one in" in done.stderr
    assert not kit.environment.exists()


def test_a_library_that_is_not_what_was_packed_ends_with_status_9(kit):
    assert kit.unpack(*kit.parts).returncode == 0
    sums = kit.folder / f"kit/files/vllm-{RELEASE}.sums"
    sums.write_text(sums.read_text().replace(sums.read_text()[:8], "0" * 8))
    next(kit.environment.glob("lib/python*/site-packages/.vllm-*")).unlink()
    made = archives.ENDING
    with pytest.raises(parts.Damaged, match=r"kernels\.so is damaged"):
        unpack._unpack(kit.folder / f"kit/files/vllm-{RELEASE}{made}", kit.library.parents[1])


def test_what_is_restored_is_the_library_that_was_released(kit):
    assert kit.unpack(*kit.parts).returncode == 0
    damage(kit.library)
    described = kit.environment / "original/spans.json"
    original = kit.folder / f"kit/files/original-{RELEASE}{archives.ENDING}"
    changed = json.loads(described.read_text()) | {"sha256": "0" * 64}
    described.write_text(json.dumps(changed))
    with pytest.raises(parts.Damaged, match="cannot be restored"):
        unpack.restore(original, kit.library.parents[1])
