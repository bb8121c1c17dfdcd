"""Engines on the emulated device, beside plain vLLM there, under delays: docs/results/cuda.json.

    python -m harness.cuda.campaign [RELEASE...] [--seeds 10] [--engines NAME...]

A process imports vLLM once, and its engines are forks of it: one for each set of variables, some of
which kvcached and kvpatch read when they are imported.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

from packaging.version import Version

from harness import ROOT, connectors, console, provenance, releases
from harness.cuda import emulated, environment
from harness.engines.runs import model_of

RESULT = ROOT / "docs/results/cuda.json"
INSIDE = Path(__file__).with_name("engine.py")
LIMIT = 3600  # seconds of all engines of a process
OF_ONE = 900  # seconds of one
MIB = 1 << 20
TIER = 256 * MIB  # room for all prompts
PROMPTS = 8
# Before it kvcached has Model Runner V1 only, where plain vLLM may choose V2.
RUNNER_V2 = Version("0.28")
KINDS = emulated.DELAYS[1:]
# Pages hold 1024 tokens, and none is kept in reserve: what a prompt leaves is unmapped, but for
# the blocks of the longest, whose bytes are looked at.
PAGES = {
    "KVCACHED_MAX_RESERVED_PAGES": "0",
    "KVCACHED_MIN_RESERVED_PAGES": "0",
    "KVCACHED_PAGE_PREALLOC_ENABLED": "false",
    "KVCACHED_MAX_CACHED_TOKENS": "1000",
}
# A sleep of level 2, and the first reset behind reload_weights, empty the tier.
EMPTIED = ("Offloading, sleep 2",)
# vLLM's own kernel for it takes memory of the other device, by CUDA's handles for processes.
TWO_RANKS = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "disable_custom_all_reduce": True,
}
TWO_DEVICES = {"KVPATCH_STAND_IN_GPUS": "2"}
Job = dict[str, Any]


def prompts() -> list[list[int]]:
    """Return seeded prompts of 300 to 860 tokens."""
    source = random.Random(7)
    lengths = [300 + 97 * index % 560 for index in range(PROMPTS)]
    return [[source.randrange(3, 300) for _ in range(length)] for length in lengths]


def engines(folder: Path) -> dict[str, Job]:
    """Return engines by name: what differs in their jobs, and the variables of their process."""
    offloading = connectors.offloading(TIER)
    eager = connectors.simple(TIER, lazy=False)
    disk = {"type": "fs", "root_dir": str(folder / "disk")}
    found: dict[str, Job] = {
        name: {"engine": {"kv_transfer_config": one}}
        for name, one in {
            "Offloading": offloading,
            "Simple eager": eager,
            "Simple lazy": connectors.simple(TIER, lazy=True),
            "tiering fs": connectors.tiering(TIER // 8, [disk]),
            "Multi": connectors.multi(offloading, eager),
        }.items()
    }
    given = found["Offloading"]["engine"]
    by_layer = {"process": {"KVCACHED_CONTIGUOUS_LAYOUT": "false"}}
    asleep = {"step": "slept", "engine": given | {"enable_sleep_mode": True}, "lift": ["KVP341"]}
    return found | {
        "Offloading, two ranks": {"engine": given | TWO_RANKS, "process": TWO_DEVICES},
        "Offloading, mp": {"engine": given | {"distributed_executor_backend": "mp"}},
        "Offloading, non-contiguous": found["Offloading"] | by_layer,
        "Simple eager, non-contiguous": found["Simple eager"] | by_layer,
        # Refused on a GPU until they ran on one.
        "Offloading, host pool": found["Offloading"]
        | {"lift": ["KVP344"], "process": {"KVPATCH_HOST_POOL": f"{TIER}@cuda{os.getpid()}"}},
        "Offloading, sleep 1": asleep | {"level": 1},
        "Offloading, sleep 2": asleep | {"level": 2},
    }


def job(folder: Path, name: str, step: str, **more: Any) -> Job:
    """Return the job of an engine; ``more`` are its connector, its rounds and its rows."""
    engine = {
        "enforce_eager": True,
        "dtype": "bfloat16",
        "block_size": 32,
        "max_model_len": 1024,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "gpu_memory_utilization": 0.5,
        "num_gpu_blocks_override": 320,
    }
    return {
        "model": str(model_of("llama", 8)),
        "engine": engine | more.pop("engine", {}),
        "step": step,
        "prompts": prompts(),
        "max_tokens": [1 + 3 * index % 4 for index in range(PROMPTS)],
        "looked_at": 4,
        "seconds": OF_ONE,
        "delays": emulated.DELAYS,
        "reset": {"reset_connector": True},
        "truth": str(folder / "truth.npz"),
        "answers": str(folder / "answers.json"),
        "log": str(folder / f"{name}.log".replace(" ", "-")),
        **more,
    }


def rounds_of(seeds: int) -> list[tuple[str, int]]:
    """Return the rounds of an engine: one without delays, and ``seeds`` of each kind."""
    return [("none", 0), *((kind, seed) for kind in KINDS for seed in range(seeds))]


def runner_of(version: str) -> dict[str, str]:
    """Return the variable with which plain vLLM has the model runner of engines with kvcached."""
    return {"VLLM_USE_V2_MODEL_RUNNER": str(int(Version(version) >= RUNNER_V2))}


def started(
    version: str, jobs: dict[str, Job], folder: Path, limit: float = LIMIT, **changes: str
) -> dict[str, Any]:
    """Run engines of a release in one process; return what each came to that ended, by its name.

    Raises:
        AssertionError: none ended within ``limit`` seconds; the log of the process.
    """
    python = emulated.made(version)
    changes |= runner_of(version)
    given = emulated.environ(version, folder, PYTHONHASHSEED="0", **changes)
    found, log = environment.through(INSIDE, jobs, python, given, limit)
    assert found, log[-4000:]
    return dict(found["jobs"])


def plain(version: str, folder: Path, two: bool = False) -> dict[str, Any]:
    """Let plain vLLM answer, with ``two`` ranks, for the engines of this folder."""
    engine, more = (TWO_RANKS, TWO_DEVICES) if two else ({}, {})
    jobs = {"plain": job(folder, "plain", "plain", engine=engine)}
    changes = more | {"KVPATCH": "0", "ENABLE_KVCACHED": "false"}
    found = started(version, jobs, folder, LIMIT, **changes)["plain"]
    assert "ended" not in found, found
    (folder / "answers.json").write_text(json.dumps({"tokens": found["tokens"]}))
    return dict(found)


def ours(
    version: str, folder: Path, wanted: dict[str, Job], limit: float = LIMIT
) -> dict[str, Any]:
    """Run engines with kvpatch; return what each came to, by its name."""
    found: dict[str, Any] = {}
    processes: dict[str, dict[str, Job]] = {}
    for name, one in wanted.items():
        variables = json.dumps(one.get("process", {}))
        processes.setdefault(variables, {})[name] = job(folder, name, **{"step": "offloaded"} | one)
    for variables, jobs in processes.items():
        changes = {"KVCACHED_CONTIGUOUS_LAYOUT": "true"} | PAGES | json.loads(variables)
        found |= started(version, jobs, folder, limit, ENABLE_KVCACHED="true", **changes)
    return found


def of_nvidia(libraries: list[str], version: str) -> list[str]:
    """Return those of the libraries of a process that are NVIDIA's own: none may be."""
    names = ("libcudart", "libcuda.", "libnvidia", "libcublas", "libcudnn", "libnccl", "libnvrtc")
    site = environment.site_of(version).resolve()
    here = (str(emulated.device_of(version).resolve()), str(site))
    real = str(site / "nvidia/cu13/lib/libcudart.so.13")
    found = {one: str(Path(one).resolve()) for one in libraries}
    return [
        one
        for one, path in found.items()
        if path == real or (Path(one).name.startswith(names) and not path.startswith(here))
    ]


def summed(found: dict[str, Any], version: str) -> dict[str, Any]:
    """Return the row of an engine in the result file."""
    if "ended" in found:
        return {"ended": found["ended"].splitlines()[-1][:300]}
    rounds = found["rounds"]
    blocks = {name: sum(one["blocks"][name] for one in rounds) for name in rounds[0]["blocks"]}
    return {
        "rounds": len(rounds),
        "wrong answers": sum(one["wrong answers"] for one in rounds),
        "restored tokens": sum(one["restored"] for one in rounds),
        "blocks": blocks,
        "complaints": sum(one["complained"] for one in rounds),
        "first complaint": next((one for each in rounds for one in each["complaints"]), ""),
        "unmaps": found["counts"]["unmaps"],
        "copies": found["counts"]["copies"],
        "start seconds": found["start seconds"],
        "processor seconds": found["processor seconds"],
        "of NVIDIA": of_nvidia(found["libraries"], version),
    }


def right(row: dict[str, Any], restores: bool = True) -> bool:
    """Return whether an engine did what plain vLLM does, and its device had no complaint.

    Args:
        restores: whether its prompts come back from the tier: those of ``EMPTIED`` must not.
    """
    if "ended" in row:
        return False
    wrong = row["wrong answers"] or row["complaints"] or row["of NVIDIA"]
    blocks = row["blocks"]
    restored = row["restored tokens"] > 0
    return not wrong and restored == restores and not (blocks["wrong"] or blocks["unknown"])


def record(new: dict[str, dict[str, Any]]) -> None:
    """Put sections into the result file; what they do not name stays as it is."""
    with Path(__file__).open() as lock:  # releases may run beside each other
        fcntl.flock(lock, fcntl.LOCK_EX)
        kept = json.loads(RESULT.read_text())
        for section, rows in new.items():
            for name, row in rows.items():
                before = kept.setdefault(section, {}).get(name)
                merges = section in ("releases", "served") and before
                kept[section][name] = before | row if merges else row
        provenance.write(kept | {"machine": provenance.machine()}, RESULT)


def main() -> int:
    """Run engines and record each release; 1 where one is not right."""
    parser = console.parser("python -m harness.cuda.campaign", __doc__ or "")
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="of vLLM")
    parser.add_argument("--seeds", type=int, default=10, help="of each kind of delay")
    parser.add_argument(
        "--seconds", type=float, default=LIMIT, help="of a process; what ended by then is recorded"
    )
    parser.add_argument("--engines", nargs="+", metavar="NAME", help="by default all")
    asked = parser.parse_args()
    rounds = rounds_of(asked.seeds)
    wrong = False
    for version in asked.releases or [releases.newest_built()]:
        found: dict[str, Any] = {}
        for two in (False, True):
            with tempfile.TemporaryDirectory(prefix="kvpatch-cuda-") as name:
                folder = Path(name)
                every = engines(folder)
                wanted = {
                    one: every[one] | {"rounds": rounds}
                    for one in asked.engines or every
                    if (every[one]["engine"].get("tensor_parallel_size") == 2) == two
                }
                if wanted:
                    plain(version, folder, two)
                    found |= ours(version, folder, wanted, asked.seconds)
        # Each row has its own commit; the versions are those of the release's environment.
        own = {"commit": provenance.commit()}
        rows = {name: summed(one, version) | own for name, one in found.items()}
        wrong |= not all(right(row, name not in EMPTIED) for name, row in rows.items())
        print(json.dumps(rows, indent=1))
        record({"releases": {version: rows}})
    return int(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
