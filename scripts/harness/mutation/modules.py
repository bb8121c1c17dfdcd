"""The modules that are mutated, and the tests that are nearest to each."""

import ast
from functools import cache
from pathlib import Path

FEATURES = "kvpatch/patches"
# Modules of the core that need no vLLM, and tests that reach them by a name in a table or a text,
# not by an import. secondary_tiers/fs.py needs it: tests/engine/test_tier_classes.py.
# A name with a folder is a test of another lane: one that needs torch, but starts no engine.
TENSORS = "engine/test_tier_fingerprint.py"
RULES = ("test_rules.py", "test_rules_edges.py", "test_simple_refusals.py", "test_tier_rules.py")
MODULES: dict[str, tuple[str, ...]] = {
    f"{FEATURES}/fence/fence.py": (),
    f"{FEATURES}/fence/hooks.py": (),
    f"{FEATURES}/fence/legacy.py": (),
    f"{FEATURES}/elastic_memory/regions.py": (),
    f"{FEATURES}/elastic_memory/verify.py": (),
    f"{FEATURES}/elastic_memory/configuration.py": RULES,
    f"{FEATURES}/elastic_memory/rules.py": RULES,
    f"{FEATURES}/offloading/registration.py": (),
    f"{FEATURES}/offloading/connector_rules.py": RULES,
    f"{FEATURES}/offloading/dtype_rules.py": RULES,
    f"{FEATURES}/offloading/model_rules.py": RULES,
    f"{FEATURES}/offloading/rules.py": RULES,
    f"{FEATURES}/offloading/memory_rules.py": RULES,
    f"{FEATURES}/offloading/cpu_tier.py": RULES,
    f"{FEATURES}/kvcached_adapters/rules.py": RULES,
    f"{FEATURES}/simple_offload/registration.py": (),
    f"{FEATURES}/simple_offload/cpu_pool.py": (),
    f"{FEATURES}/simple_offload/metrics.py": (),
    f"{FEATURES}/simple_offload/rules.py": RULES,
    f"{FEATURES}/simple_offload/lifetime.py": (),
    f"{FEATURES}/simple_offload/eviction.py": (),
    f"{FEATURES}/simple_offload/legacy.py": (),
    f"{FEATURES}/simple_offload/fixes.py": (),
    f"{FEATURES}/deadlock.py": (),
    "kvpatch/gate.py": (),
    "kvpatch/patch.py": (),
    "kvpatch/rows.py": ("test_rows_written.py",),
    "kvpatch/rules.py": RULES,
    f"{FEATURES}/secondary_tiers/rules.py": RULES,
    f"{FEATURES}/secondary_tiers/promotion.py": (),
    f"{FEATURES}/secondary_tiers/legacy.py": (),
    f"{FEATURES}/secondary_tiers/fixes.py": (),
    f"{FEATURES}/secondary_tiers/fingerprint.py": (),
    f"{FEATURES}/secondary_tiers/samples.py": (TENSORS,),
    f"{FEATURES}/secondary_tiers/weights.py": (),
    f"{FEATURES}/secondary_tiers/admission.py": (),
    f"{FEATURES}/secondary_tiers/timeout.py": (),
    f"{FEATURES}/secondary_tiers/block_files.py": ("test_tier_size.py",),
    f"{FEATURES}/secondary_tiers/capacity.py": ("test_tier_size.py",),
    f"{FEATURES}/secondary_tiers/shared_memory.py": (),
    f"{FEATURES}/secondary_tiers/parts.py": (),
    f"{FEATURES}/elastic_memory/ipc_name.py": ("test_ipc_name.py", "test_data_parallel.py"),
    f"{FEATURES}/elastic_memory/ranks.py": (),
    f"{FEATURES}/elastic_memory/allocation.py": (),
    f"{FEATURES}/elastic_memory/reservation.py": (),
    f"{FEATURES}/elastic_memory/eviction.py": ("test_eviction.py",),
    f"{FEATURES}/suspend/share.py": ("test_giving.py",),
    f"{FEATURES}/suspend/coldest.py": ("test_eviction.py", "test_giving.py"),
    f"{FEATURES}/kvcached_adapters/runner_choice.py": (),
    "kvpatch/claims.py": (),
    "kvpatch/pool/worth.py": (),
    "kvpatch/telemetry/status_page.py": ("test_telemetry.py", "test_engines.py"),
}
# These start processes, take a minute, or are about other things; a module may name them.
FAR = (
    "test_debug.py",
    "test_docs_pages.py",
    "test_doctor.py",
    "test_evidence.py",
    "test_fence_world.py",
    "test_matrix.py",
    "test_offloading_legacy.py",
    "test_refusal.py",
    "test_refusal_report.py",
    "test_rows.py",
    "test_telemetry.py",
)
# These take longer: they are asked only about what the other tests let pass.
SLOW = ("tests/unit/test_page_faults.py", f"tests/{TENSORS}")


def nearest(root: Path, module: str) -> list[str]:
    """Return the unit tests that import a module, and those that ``MODULES`` names.

    Args:
        root: the root of a tree.
        module: the path of a module in it.
    """
    name = module.removesuffix(".py").replace("/", ".")
    folder = root / "tests/unit"
    tests = []
    for path in sorted(folder.glob("test_*.py")):
        if path.name in MODULES.get(module, ()) or (
            path.name not in FAR and name in _imported(path, folder)
        ):
            tests.append(f"tests/unit/{path.name}")
    return tests + [f"tests/{name}" for name in MODULES.get(module, ()) if "/" in name]


@cache
def _imported(path: Path, folder: Path) -> set[str]:
    """Return the names of the modules that a test imports, by itself or by its helpers."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            for helper in (node.module, *(alias.name for alias in node.names)):
                other = folder / f"{helper.rpartition('.')[2]}.py"
                if other.is_file() and other != path:
                    found |= _imported(other, folder)
    return found
