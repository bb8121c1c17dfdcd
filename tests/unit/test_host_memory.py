"""What the host's memory leaves for a CPU tier, and what tiers take of it."""

import os
from types import SimpleNamespace

import pytest
from fakes import transfer

from kvpatch import cgroup, host_memory, process
from kvpatch.environ import OUR_IPC_NAME
from kvpatch.patches.offloading import cpu_tier
from kvpatch.versions import Facts, Installed

GIB = 1 << 30


@pytest.fixture
def hierarchy(tmp_path):
    """Write the file with a process's cgroups, and the files of its hierarchies."""

    def make(lines, files):
        proc, root = tmp_path / "cgroup", tmp_path / "fs"
        proc.write_text(lines)
        root.mkdir()
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return proc, root

    return make


OF_V2 = {
    "memory.max": f"{64 * GIB}\n",
    "memory.current": f"{50 * GIB}\n",
    "memory.stat": f"anon {10 * GIB}\nfile {39 * GIB}\nshmem {4 * GIB}\n",
}
ABOVE = {
    "pods/one/engine/memory.max": f"{100 * GIB}",
    "pods/one/engine/memory.current": f"{GIB}",
    "pods/one/memory.max": f"{90 * GIB}",
    "pods/one/memory.current": f"{80 * GIB}",
    "pods/memory.max": "max",
    "pods/memory.current": f"{80 * GIB}",
}
OF_V1 = "9:name=systemd:/docker/abc\n5:cpuacct,cpu:/docker/abc\n4:memory:/docker/abc\n0::/\n"


def of_v1(place):
    return {
        f"memory/{place}memory.limit_in_bytes": f"{32 * GIB}\n",
        f"memory/{place}memory.usage_in_bytes": f"{20 * GIB}\n",
        f"memory/{place}memory.stat": f"cache 1\ntotal_cache {12 * GIB}\ntotal_shmem {2 * GIB}\n",
    }


UNLIMITED = {
    "memory/memory.limit_in_bytes": "9223372036854771712",
    "memory/memory.usage_in_bytes": "7",
}


@pytest.mark.parametrize(
    ("lines", "files", "tightest"),
    [
        # Its own cgroup is the root of what a container sees. 35 of the 39 GiB of cache are files,
        # and can be dropped; 4 are in /dev/shm.
        ("0::/\n", OF_V2, (64 * GIB, 49 * GIB)),
        ("0::/\n", {"memory.max": "max\n", "memory.current": "5\n"}, None),
        ("0::/pods/one/engine\n", ABOVE, (90 * GIB, 10 * GIB)),
        # Without a cgroup namespace the path is the host's, and only the mount's root is there.
        (OF_V1, of_v1(""), (32 * GIB, 22 * GIB)),
        (OF_V1, of_v1("docker/abc/"), (32 * GIB, 22 * GIB)),
        ("4:memory:/\n", UNLIMITED, None),
        (
            "0::/\n",
            {"memory.max": "100", "memory.current": "130", "memory.stat": "file 3\nshmem 9\n"},
            (100, 0),
        ),
    ],
    ids=["v2", "v2 unlimited", "above", "v1", "v1 in place", "v1 unlimited", "used up"],
)
def test_the_tightest_limit_of_a_container(hierarchy, lines, files, tightest):
    assert cgroup.tightest(*hierarchy(lines, files)) == tightest


def test_a_machine_without_cgroups(tmp_path):
    assert cgroup.tightest(tmp_path / "none", tmp_path) is None


def test_the_memory_of_this_machine(tmp_path):
    memory = host_memory.here(tmp_path)
    assert memory.shm == pytest.approx(os.statvfs(tmp_path).f_bavail << 12, rel=0.2)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory.available <= total
    assert host_memory.here(tmp_path / "none").shm is None


def test_a_process_that_may_start_an_engine_reads_it(monkeypatch):
    monkeypatch.setattr(process.multiprocessing, "parent_process", lambda: None)
    assert host_memory.reader({})() is not None
    assert host_memory.reader({OUR_IPC_NAME.name: "inherited by a program"})() is not None


def test_a_process_of_an_engine_does_not(monkeypatch):
    """A part of the memory is the tier's own by then."""
    monkeypatch.setattr(process.multiprocessing, "parent_process", lambda: object())
    assert host_memory.reader({OUR_IPC_NAME.name: "inherited"}) is None
    assert host_memory.reader({}) is not None  # of a script that does not have kvpatch on


def test_nor_does_a_spawned_one_that_is_still_unpickling(monkeypatch):
    """It has no parent_process() yet, and imports vllm then."""
    current = process.multiprocessing.current_process()
    monkeypatch.setattr(current, "_inheriting", True, raising=False)
    assert host_memory.reader({OUR_IPC_NAME.name: "inherited"}) is None


def test_nor_does_a_forked_one():
    reader = host_memory.reader({})
    child = os.fork()
    if child == 0:
        os._exit(0 if reader() is None else 1)
    assert os.waitpid(child, 0)[1] == 0


def facts(vllm, device="cuda", contiguous=True, **environment):
    installed = Installed.release("vllm", vllm)
    return Facts(installed, Installed.release("kvcached", "0.1.6"), environment, device, contiguous)


def config(extra, name="OffloadingConnector", ranks=1):
    return SimpleNamespace(
        kv_transfer_config=transfer(name, **extra),
        parallel_config=SimpleNamespace(world_size=ranks, data_parallel_size=1),
    )


def taken(extra, here, **more):
    """GiB in /dev/shm and in all."""
    tiers = cpu_tier.of(config(extra, **more), here)
    return cpu_tier.in_shm(tiers) / GIB, cpu_tier.in_all(tiers) / GIB


SIZE = {"cpu_bytes_to_use": 65.0 * GIB}  # a float, as --kv-offloading-size 65 makes it
TIERING = SIZE | {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "fs"}]}


SIMPLE = "SimpleCPUOffloadConnector"
EVEN = {"cpu_bytes_to_use": 64 * GIB}
EACH = SIZE | {"cpu_bytes_to_use_per_rank": 10 * GIB}
HOST = TIERING | {"spec_name": "HostTieringOffloadingSpec"}
BOTH = [
    {"kv_connector": name, "kv_connector_extra_config": SIZE}
    for name in ("OffloadingConnector", SIMPLE)
]


@pytest.mark.parametrize(
    ("extra", "release", "device", "more", "expected"),
    [
        (SIZE, "0.16.0", "cuda", {}, (0, 128)),
        (SIZE, "0.26.0", "cuda", {}, (0, 128)),
        (SIZE, "0.27.1", "cuda", {}, (65, 65)),
        (SIZE, "0.32.0", "cuda", {}, (65, 65)),
        (SIZE, "0.29.0+rocm700", "cuda", {}, (65, 65)),
        (SIZE, "0.30.0+rocm700", "cuda", {}, (0, 128)),
        # With secondary tiers it is in /dev/shm in every release.
        (TIERING, "0.24.0", "cuda", {}, (65, 65)),
        (HOST, "0.26.0", "cpu", {}, (65, 65)),
        # The host device takes ordinary memory as it is written.
        (SIZE, "0.26.0", "cpu", {}, (0, 0)),
        (SIZE, "0.32.0", "cpu", {}, (65, 65)),
        (SIZE, "0.32.0", "cpu", {"name": SIMPLE}, (0, 0)),
        # SimpleCPUOffloadConnector is not rounded.
        (SIZE, "0.24.0", "cuda", {"name": SIMPLE, "ranks": 2}, (0, 65)),
        ({}, "0.24.0", "cuda", {"name": SIMPLE, "ranks": 2}, (0, 8)),
        (EACH, "0.24.0", "cuda", {"name": SIMPLE, "ranks": 2}, (0, 20)),
        # The tiers inside a MultiConnector add up.
        ({"connectors": BOTH}, "0.32.0", "cuda", {"name": "MultiConnector"}, (65, 130)),
        # A size that is not given, or that vLLM refuses, is left to it.
        ({}, "0.32.0", "cuda", {}, (0, 0)),
        *(
            ({"cpu_bytes_to_use": size}, "0.32.0", "cuda", {}, (0, 0))
            for size in (None, 0, "much", [1])
        ),
    ],
)
def test_where_the_tier_of_the_offloading_connector_is(extra, release, device, more, expected):
    assert taken(extra, facts(release, device), **more) == expected


@pytest.mark.parametrize(
    ("of_ranks", "count"),
    [
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, 2),
        ({"data_parallel_size": 4}, 4),  # a release that has no engines elsewhere
        ({"data_parallel_size": 1, "data_parallel_size_local": 2}, 1),  # an engine of those
    ],
)
def test_each_engine_of_a_server_has_a_tier(of_ranks, count):
    assert cpu_tier.engines(SimpleNamespace(parallel_config=SimpleNamespace(**of_ranks))) == count


def test_torch_rounds_the_memory_of_each_rank():
    assert taken(SIZE, facts("0.26.0"), ranks=4) == (0, 4 * 32)
    assert taken(EVEN, facts("0.26.0"), ranks=4) == (0, 64)
    (tier,) = cpu_tier.of(config({"cpu_bytes_to_use": 64 * GIB + 1}), facts("0.26.0"))
    assert (tier.asked, tier.taken, tier.rounded) == (64 * GIB + 1, 128 * GIB, True)


def test_torch_rounds_each_layer_in_the_other_layout():
    """How many there are is not known yet; the tier takes what is asked for, at least."""
    (tier,) = cpu_tier.of(config(SIZE), facts("0.26.0", contiguous=False))
    assert (tier.taken, tier.rounded) == (65 * GIB, True)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_torch_that_is_told_not_to_round(variable):
    here = facts("0.26.0", **{variable: "pinned_max_round_threshold_mb:1024"})
    (tier,) = cpu_tier.of(config(SIZE), here)
    assert (tier.taken, tier.rounded) == (65 * GIB, False)


@pytest.mark.parametrize(
    ("release", "device", "name", "expected"),
    [
        ("0.32.0", "cuda", "OffloadingConnector", (64, 64, True, 0, False)),
        # Registered by each rank, whole.
        ("0.30.0", "cuda", "OffloadingConnector", (64, 64, True, 64, False)),
        ("0.30.0", "cpu", "OffloadingConnector", (64, 64, True, 0, False)),
        ("0.26.0", "cpu", "OffloadingConnector", (64, 0, False, 0, False)),
        ("0.26.0", "cuda", "OffloadingConnector", (64, 64, False, 0, True)),  # by torch
        ("0.32.0", "xpu", "OffloadingConnector", (64, 0, False, 0, False)),
        ("0.32.0", "cuda", SIMPLE, (64, 64, False, 32, False)),
        ("0.32.0", "cpu", SIMPLE, (64, 0, False, 0, False)),
    ],
)
def test_all_that_is_known_of_a_tier(release, device, name, expected):
    (tier,) = cpu_tier.of(config(EVEN, name, ranks=2), facts(release, device))
    asked, taken, in_shm, registered, rounded = expected
    assert tier == (asked * GIB, taken * GIB, in_shm, registered * GIB, rounded)


@pytest.mark.parametrize(
    ("release", "name", "contiguous", "registered"),
    [
        ("0.30.0", "OffloadingConnector", True, 600),  # by each rank, whole
        ("0.31.0", "OffloadingConnector", True, 0),  # in parts
        ("0.26.0", "OffloadingConnector", True, 0),  # allocated by torch
        ("0.32.0", SIMPLE, True, 300),
        ("0.32.0", SIMPLE, False, 0),  # layer by layer
    ],
)
def test_the_largest_range_that_is_registered(release, name, contiguous, registered):
    made = config({"cpu_bytes_to_use": 600 * GIB}, name, ranks=2)
    (tier,) = cpu_tier.of(made, facts(release, contiguous=contiguous))
    assert tier.registered == registered * GIB


def test_a_tier_of_nothing_is_none_and_one_of_a_byte_is_one():
    for size, count in ((None, 0), (0, 0), (1, 1)):
        assert len(cpu_tier.of(config({"cpu_bytes_to_use": size}), facts("0.32.0"))) == count
    inside = [
        {"kv_connector": name, "kv_connector_extra_config": {"cpu_bytes_to_use": size}}
        for name, size in (
            ("AnotherConnector", 5),
            ("OffloadingConnector", "much"),
            ("SimpleCPUOffloadConnector", 1),
        )
    ]
    tiers = cpu_tier.of(config({"connectors": inside}, "MultiConnector"), facts("0.32.0"))
    assert [tier.asked for tier in tiers] == [1]


def test_a_power_of_two():
    assert [cpu_tier.power_of_two(size) for size in (1, 2, 3, 4, 5, 1024, 1025)] == [
        *(1, 2, 4, 4, 8, 1024, 2048)
    ]


def test_every_tier_in_shm_counts():
    tiers = [
        cpu_tier.CpuTier(1, size, bool(shm), 0, False) for size, shm in ((3, 1), (4, 1), (9, 0))
    ]
    assert cpu_tier.in_shm(tiers) == 7
