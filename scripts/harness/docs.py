"""scripts/docs: the generated documentation.

From the recorded runs: kvpatch/matrix/verdicts.json, which the wheel has. From the tables of
kvpatch: docs/patches.md, docs/support.md, docs/errors.md, docs/settings.md and the grid of
README.md. From docs/results/cuda.json and tools.json: the sections between the markers of
docs/cuda-emulator.md and docs/measuring.md. From the marks of tests: that of docs/faults.md. From
docs/results: docs/numbers.md and its plots, the figures of README.md and docs/index.md, what
docs/patches.md says was seen without a row, and docs/upstream.md. From vLLM's recipes:
docs/vllm-recipes.md and their shares in README.md. From docs/results/gpu.json, which need not be
there: what docs/on-a-gpu.md, README.md, docs/index.md and docs/support.md say of GPUs.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from packaging.version import Version

from harness import ROOT, console, failure, faults, tools
from harness.bench import page, quoted
from harness.cuda import campaign
from harness.gpu import page as gpu
from harness.markdown import RIGHT, TEMPLATES, put, render, table
from harness.matrix import derive, npus, sharing, without, without_rows
from harness.recipes import table as recipes
from harness.upstream import page as upstream
from kvpatch import environ, patches, rules, supported
from kvpatch.matrix import tables, verdicts
from kvpatch.matrix.verdicts import Matrix
from kvpatch.patch import Feature, Gap, Kind, Patch, Seam
from kvpatch.patches.elastic_memory import regions
from kvpatch.patches.offloading import connector_rules, dtype_rules
from kvpatch.patches.secondary_tiers import rules as tiers
from kvpatch.refusal import CODES, Basis
from kvpatch.telemetry import prometheus, series
from kvpatch.versions import in_words

NAMES = {"tiering fs": "Secondary tier fs"}  # in README.md, where they are otherwise unexplained

FAULTS = "docs/faults.md"
MEASURING = "docs/measuring.md"
EMULATED = "docs/cuda-emulator.md"
RESULTS = "docs/results"
VERDICTS = "kvpatch/matrix/verdicts.json"
README, INDEX = "README.md", "docs/index.md"


def code(names: Iterable[str]) -> str:
    """Return names in a list."""
    return ", ".join(f"`{name}`" for name in names)


def validated_from(feature: Feature) -> str:
    """Return the oldest validated release of a feature, in words."""
    if feature.name == "ascend":
        right = [
            ascend
            for (ascend, _), verdict in npus.verdicts().items()
            if verdict.kind is verdicts.Kind.EMULATED
        ]
        emulated = f"; on the ACL emulator {in_words(dict.fromkeys(right))}" if right else ""
        return f"none on an NPU (KVP603){emulated}"
    validated = supported.validated(feature.span)
    if not validated:
        return "none yet"
    return "all" if validated[0] == supported.validated()[0] else f"from {validated[0]} on"


def by_target() -> dict[str, list[str]]:
    """Return the patches of each target, in the order of application."""
    found: dict[str, list[str]] = {}
    for feature in patches.FEATURES:
        for patch in feature.patches:
            found.setdefault(patch.target, []).append(f"`{patch.id}` `{patch.span}`")
    return dict(sorted(found.items()))


def parts(feature: Feature) -> list[Patch | Gap]:
    """Return the patches and gaps of a feature, seam by seam."""
    seams = (one.parts if isinstance(one, Seam) else (one,) for one in feature.seams)
    return [part for seam in seams for part in seam]


def left_out(patch_id: str) -> list[str]:
    """Return what was seen without a patch of the newest release, load by load, and its test."""
    if patch_id not in without_rows.ROWS:
        return []
    one = without_rows.ROWS[patch_id]
    lines = []
    for look in without.read().get("rows", {}).get(patch_id, ()):
        beside = f" and {code(look['also'])}" if look["also"] else ""
        words = f": `{look['words'].replace('`', chr(39))}`" if look["words"] else ""
        lines.append(f"{look['load']}, without it{beside}: {look['seen']}{words}")
    if one.test:
        why = f" ({one.why})" if one.why else ""
        lines.append(f"shown by `{one.test}`{why}")
    return lines


def loads_of(looked: dict[str, Any]) -> list[str]:
    """Return the loads that a result of ``without`` has, in the order of their table."""
    used = {look["load"] for looks in looked["rows"].values() for look in looks}
    return [name for name in without.LOADS if name in used]


def counted(looked: dict[str, Any]) -> str:
    """Return how many looks a result of ``without`` has of each kind, in words."""
    kinds = [look["seen"] for looks in looked["rows"].values() for look in looks]
    each = [f"{kinds.count(kind)}: {kind}" for kind in without.KINDS if kind in kinds]
    return f"{len(kinds)} engines: {'; '.join(each)}"


def fronts(matrix: Matrix) -> dict[str, str]:
    """Return the pages that are written by hand, the marked sections renewed."""
    results = page.read(ROOT / RESULTS)
    releases = supported.validated()[::-1]
    grid = render(
        "grid.md",
        names=[NAMES.get(one, one) for one in verdicts.CONNECTORS],
        rows=list(tables.grid(matrix.cells, releases)),
        npus=tables.on_npus(matrix.npus),
        gpus=gpu.on_gpus(results["gpu"]),
        tables=tables,
        kvcached=in_words(supported.KVCACHED),
        counts=verdicts.counts(matrix.cells.values()),
        releases=releases,
    )
    figures = quoted.sections(results)
    sections = gpu.sections(results["gpu"])
    sections[README] |= {"support": grid, "recipes": recipes.section(), **figures}
    sections[MEASURING] = {"tools": tools.section(json.loads(tools.RESULT.read_text()))}
    sections[README]["failure"] = failure.section(json.loads(failure.RESULT.read_text()))
    sections[INDEX] |= {"numbers": figures["numbers"]}
    emulator = json.loads((ROOT / RESULTS / "cuda.json").read_text())
    sections[FAULTS] = {"faults": faults.section()}
    sections[EMULATED] = {"cuda": emulated(emulator["releases"]), "served": served(emulator)}
    made = {}
    for name, marked in sections.items():
        made[name] = (ROOT / name).read_text()
        for marker, section in marked.items():
            made[name] = put(made[name], marker, section)
    return made


def cuda_starts() -> list[tuple[str, ...]]:
    """Return what CUDA builds have shown without a GPU, newest first."""
    path = ROOT / RESULTS / "gpu-start.json"
    rows = json.loads(path.read_text())["rows"][::-1] if path.exists() else []
    counted = ("torch", "patches", "accepted", "refused")
    return [
        (
            f"vLLM {row['vllm']}",
            *(str(row.get(name, "")) for name in counted),
            str(len(row.get("differing", ()))),
            row.get("device") or row["ended"],
        )
        for row in rows
    ]


def by_engine(releases: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the title, the name and the result of engines on the emulated device, newest first."""
    for version in sorted(releases, key=Version, reverse=True):
        for name, one in releases[version].items():
            if "ended" not in one:
                yield f"{name}, vLLM {version}", name, one


def emulated(releases: dict[str, dict[str, Any]]) -> str:
    """Return the table of what engines did on the emulated CUDA device."""
    counts = ("copies", "unmaps", "complaints", "start seconds")
    rows = [
        (
            *(title, str(one["rounds"]), str(one["wrong answers"])),
            f"{one['restored tokens']:,}",
            f"{one['blocks']['equal']} of {sum(one['blocks'].values())}",
            *(f"{one[count]:,}" for count in counts),
            verdict(name, one),
        )
        for title, name, one in by_engine(releases)
    ]
    head = (
        *("engine", "rounds", "wrong answers", "tokens from the tier", "blocks bit-equal"),
        *("copies", "pages unmapped", "complaints", "seconds to start", "verdict"),
    )
    return table(head, rows, RIGHT) + "\n"


def verdict(name: str, row: dict[str, Any]) -> str:
    """Return what the rounds of an engine on the emulated CUDA device say of it."""
    if name in campaign.EMPTIED:
        return "right; shows no load" if campaign.right(row, restores=False) else "wrong"
    return "validated (CUDA emulator)" if campaign.right(row) else "wrong"


def served(result: dict[str, Any]) -> str:
    """Return what servers did on the emulated CUDA device, and what it takes to have one."""
    counts = (
        *("rounds", "wrong answers", "ties", "restored tokens", "complaints"),
        *("ready seconds", "first token seconds", "first token processor seconds"),
    )
    rows = [
        (
            title,
            *(f"{one[count]:,}" for count in counts),
            f"{one['environment bytes'] / 1e9:.1f} GB",
        )
        for title, _, one in by_engine(result["served"])
    ]
    head = (
        *("`scripts/cuda serve`", "rounds", "wrong answers", "ties", "tokens from the tier"),
        *("complaints", "seconds to start", "to its first token", "of processor to it"),
        "environment",
    )
    lines = " and ".join(f"{count:,} lines of {name}" for name, count in result["lines"].items())
    return f"{table(head, rows, RIGHT)}\n\nThe device has {lines}.\n"


def pages(matrix: Matrix) -> dict[str, str]:
    """Return the pages that are made of kvpatch's tables."""
    # What only machines without a GPU have comes last.
    features = sorted(patches.FEATURES, key=lambda one: one.distribution != "kvpatch")
    every = rules.of(feature.rules for feature in features)
    filters = (
        code,
        in_words,
        supported.in_ranges,
        validated_from,
        parts,
        left_out,
        loads_of,
        counted,
    )
    TEMPLATES.filters.update({one.__name__: one for one in filters})
    values = {
        "supported": supported,
        "features": features,
        "without": without,
        "looked": without.read(),
        "in_order": patches.FEATURES,
        "by_target": by_target(),
        "connectors": verdicts.CONNECTORS,
        "every": every,
        "whys": {rule.code: rule.why for rule in every},
        "remedies": {rule.code: rule.remedy for rule in every},
        "series": [(one, "_total") for one in series.COUNTERS]
        + [(one, "") for one in (*series.GAUGES, *series.HISTOGRAMS, series.INFO, series.FEATURE)],
        "prefix": prometheus.PREFIX,
        **{"CODES": CODES, "Kind": Kind, "Basis": Basis, "environ": environ, "found": matrix.cells},
        **{"tables": tables, "verdicts": verdicts, "regions": regions, "tiers": tiers},
        **{"offloading": connector_rules, "dtypes": dtype_rules},
        "npus": matrix.npus,
        "tried": matrix.tried,
        "starts": cuda_starts(),
        "gpus": gpu.on_gpus(page.read(ROOT / RESULTS)["gpu"]),
        "shared": [(f"vLLM {one}", of, str(count)) for one, of, count in sharing.shared()[::-1]],
    }
    names = ("patches", "support", "errors", "settings")
    return {f"docs/{name}.md": render(f"{name}.md", **values) for name in names}


def every_file() -> dict[str, str]:
    """Return every generated file, by its name in the repository."""
    matrix = derive.matrix()
    return {
        VERDICTS: verdicts.text(matrix),
        **pages(matrix),
        "docs/upstream.md": upstream.render(),
        **fronts(matrix),
        recipes.PAGE: recipes.page(),
        **page.render(ROOT / RESULTS),
    }


def main() -> int:
    """Write or check every generated file."""
    parser = console.parser("scripts/docs", __doc__ or "")
    parser.add_argument("--check", action="store_true", help="only check; exit status 1 if stale")
    check = parser.parse_args().check
    stale = []
    for name, content in every_file().items():
        path = ROOT / name
        if path.exists() and path.read_text() == content:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(content)
    if check and stale:
        print(f"stale: {', '.join(stale)}; run .venv/bin/python scripts/docs", file=sys.stderr)
        return 1
    return 0
