"""What is known of mutants that no unit test notices: by module, then by the mutant's id."""

FEATURES = "kvpatch/patches"

# The change cannot be seen: the reason.
EQUIVALENT: dict[str, dict[str, str]] = {
    "kvpatch/gate.py": {
        'check_installed: package == "vllm" and found.version -> ((package == "vllm"))': (
            "a version without a number counts as the newest release, which has no fault"
        ),
    },
    "kvpatch/patch.py": {
        "Feature.at: parts -> list(parts)[:1] #2": "there is exactly one, or it was refused above",
    },
    "kvpatch/rows.py": {
        "feature: alone and isinstance(first, Patch) -> ((alone))": "a row alone is a patch",
    },
    "kvpatch/claims.py": {
        "Taken.__init__: super().__init__(pid) -> pass": "its arguments are kept in any case",
        "_release: True -> False": "that error is suppressed",
        "_remove_left: path.parent == BASE and path.lstat().st_uid == os.geteuid() -> "
        "((path.lstat().st_uid == os.geteuid()))": (
            "a name has no slash; the one other name is that of the folder, which stays"
        ),
        "_read: 1 -> (1 + 1)": "a number of bytes that was chosen, above what any claim has",
        "_read: 16 -> (16 + 1)": "a number of bytes that was chosen, above what any claim has",
    },
    f"{FEATURES}/fence/fence.py": {
        "Fence.__init__: 0 -> (0 + 1) #2": "only differences of the number of builds are used",
        "Fence._may_go: not for_plan and bool(self._let_go) and not self._let_go.isdisjoint(pages)"
        " -> ((bool(self._let_go)) and (not self._let_go.isdisjoint(pages)))": (
            "pages that wait for a plan are held whatever else is known of them"
        ),
        "Fence._count_release: self._forget(page) -> pass": (
            "split forgets it in any case, with a look at every held page"
        ),
    },
    f"{FEATURES}/fence/hooks.py": {
        "around_build: (getattr(job, side),) -> list((getattr(job, side),))[:1]": (
            "it has one element"
        ),
        "around_release: [(0, released)] if released else () -> ([(0, released)])": (
            "kvcached drops an entry of epoch 0 without pages at once"
        ),
        "around_release: fenced.may_keep() if retired else 0 -> (fenced.may_keep())": (
            "of no retired pages none is kept; it saves counting the free pages"
        ),
        "around_release: 0 -> (0 + 1)": "of no retired pages none is kept",
    },
    f"{FEATURES}/suspend/share.py": {
        "Share.__init__: 0.0 -> (0.0 + 1)": "what is above 0 is not kept for the next share",
    },
    f"{FEATURES}/elastic_memory/regions.py": {
        "_is_validated_fp8: 0 -> (0 + 1)": "each of the two was compared",
    },
    f"{FEATURES}/elastic_memory/verify.py": {
        "module: 1.0 -> (1.0 + 1)": "a number of seconds that was chosen",
    },
    f"{FEATURES}/elastic_memory/reservation.py": {
        "around_wait: 0.01 -> (0.01 + 1)": "a number of seconds that was chosen",
    },
    f"{FEATURES}/elastic_memory/ranks.py": {
        "module: 1.0 -> (1.0 + 1)": "a number of seconds that was chosen; the tests use its name",
        "Ranks: 0 -> (0 + 1)": "the ranks are asked before it is used for the first time",
        "Ranks: 0.0 -> (0.0 + 1)": "the clock counts from the machine's start, seconds before",
        "Ranks: 0.0 -> (0.0 + 1) #2": "the clock counts from the machine's start, seconds before",
    },
    f"{FEATURES}/offloading/memory_rules.py": {
        "_what: free or 0 -> ((free))": "no rule applies where it is None",
        "_shm: memory and memory.shm -> ((memory.shm))": "the rule applies with a memory only",
        "_container: memory and memory.container -> ((memory.container))": (
            "the rule applies with a memory only"
        ),
        "_machine: memory and memory.available -> ((memory.available))": (
            "the rule applies with a memory only"
        ),
        "_tight: memory is None or taken == 0 -> ((memory is None))": (
            "nothing is never more than what is free"
        ),
    },
    f"{FEATURES}/offloading/rules.py": {
        "_scheduler: requested is None or not isinstance(requested, type) -> "
        "((not isinstance(requested, type)))": "None is no class, and is returned in both cases",
        "has_threshold: 0 -> (0 + 1)": "the first use is no later one",
        "_never_set: found -> list(found)[:1]": "a refusal names the first",
    },
    f"{FEATURES}/offloading/model_rules.py": {
        "_has_experts: 1 -> (1 + 1)": "more layers than are dense, in both cases",
    },
    f"{FEATURES}/simple_offload/rules.py": {
        '_eager_windows: _is_simple(config, facts) and not all(_values(config, "lazy_ ... '
        'ding_window() is not None -> ((not all(_values(config, "lazy_offload"))) and (not config. '
        "... ng_window() is not None))": "without this connector there is no value, and all hold",
    },
    f"{FEATURES}/secondary_tiers/block_files.py": {
        "module: 3600.0 -> (3600.0 + 1)": "a number of seconds that was chosen",
        "sweep: < -> <=": "a file is as old as that for one tick of the clock",
        "module: 0 -> (0 + 1)": "for systems without O_DIRECT, which Linux has",
        "store_blocks: 0 -> (0 + 1) #2": "the flag is O_WRONLY, which is set in any case",
    },
    f"{FEATURES}/secondary_tiers/capacity.py": {
        "module: 32 -> (32 + 1)": "a number of files that was chosen",
        "Folder._reserved: 0 -> (0 + 1)": "there is no room in one byte either",
        "Folder._reserved: 1e9 -> (1000000000.0 + 1)": "an hour and 3.6 ms",
        "module: 65_536 -> (65536 + 1)": "a number of files that was chosen",
        "Folder._begin_anew: 0.0 -> (0.0 + 1)": "a number of seconds that was chosen",
        "Folder.adopt: == -> != #2": "files are adopted one by one",
        "Folder.adopt: 1 -> (1 + 1)": "it is only asked whether it is 0",
        "Folder._connected: self._database.close() -> pass": "it is closed when it is deleted",
        "Folder._connected: self._database = None -> pass": "another one follows",
        'Folder._connected: database.execute("PRAGMA synchronous=OFF") -> pass': (
            "what it costs, and what a power failure leaves"
        ),
        "Folder._begin_anew: True -> False": "that error is suppressed",
        'module: ( "CREATE TABLE IF NOT EXISTS files" " (id INTEGER PRIMARY K ... SELECT 1 FROM '
        'folder)", ) -> ("CREATE TABLE IF NOT EXISTS files" " (id INTEGER PRIMARY KE ...  (SELECT '
        '1 FROM folder)")': "an index, without which a large folder takes longer",
        "Folder._files: status.st_uid != os.geteuid() or status.st_mode & 0o077 -> "
        "((status.st_mode & 0o077))": "what is another user's alone cannot be read",
        "Folder._connected: self._database is not None and self._file == (status.st_dev, "
        "status.st_ino) -> ((self._file == (status.st_dev, status.st_ino)))": (
            "a file that was known and is back after its connection was closed"
        ),
    },
    f"{FEATURES}/secondary_tiers/shared_memory.py": {
        "around_region: status.st_dev, status.st_ino -> (status.st_ino,)": (
            "all of them are in /dev/shm"
        ),
        "around_region: instance.cleanup() -> pass": "the refusal ends the process, and the map",
    },
    f"{FEATURES}/secondary_tiers/fixes.py": {
        "count_disk_hits: tokens and not request.num_preemptions -> "
        "((not request.num_preemptions))": "of no tokens none came from a disk",
    },
    f"{FEATURES}/secondary_tiers/parts.py": {
        "module: 32 -> (32 + 1)": "one name more, which vLLM gives to no part",
    },
    f"{FEATURES}/secondary_tiers/samples.py": {
        "Samples.add: tensor.is_meta or not tensor.numel() -> ((tensor.is_meta))": (
            "a tensor without values adds nothing to what is joined"
        ),
        "module: 64 -> (64 + 1)": "a number of bytes that was chosen; the tests use its name",
        "module: 20 -> (20 + 1)": "a number of bytes that was chosen; the tests use its name",
    },
    f"{FEATURES}/deadlock.py": {
        "module: 4 -> (4 + 1)": "a number of steps that was chosen; the tests count by its name",
        "module: 1000 -> (1000 + 1)": "a number of steps that was chosen; the tests count by it",
    },
    "kvpatch/telemetry/status_page.py": {
        "Writer.__init__: version.encode()[:24] -> version.encode()": "struct cuts it as well",
        "Writer.__init__: 24 -> (24 + 1)": "struct cuts it as well",
        "_identity: status.st_dev, status.st_ino -> (status.st_ino,)": (
            "a folder's files are on one device, unless something is mounted over one"
        ),
        "_create: True -> False": "it was read just before: only a process between the two sees it",
        "of_process: continue -> pass": "nothing follows in the loop",
        "ended_in_order: 5 -> (5 + 1)": "a number that was chosen, above what any engine has",
        "contents: | -> & #2": "opening a file in a file fails in the same way",
        "contents: len(data) <= limit and (more := os.read(file, limit + 1 - len(data))) -> "
        "((more := os.read(file, limit + 1 - len(data))))": "a read of no bytes ends the loop too",
        "contents: <= -> <": "what is read beyond the limit is cut off",
        "contents: - -> +": "what is read beyond the limit is cut off",
        "contents: 1 -> (1 + 1)": "what is read beyond the limit is cut off",
        "read: 50 -> (50 + 1)": "a number of attempts that was chosen",
        "read: < -> <=": "a page that ends there has no body, and is read again too",
    },
    f"{FEATURES}/simple_offload/eviction.py": {
        "EvictionOrder.must_wait: <= -> <": "with nothing missing no block is looked at",
    },
}
# The change is a fault that only an engine, a GPU or another process shows: which.
ELSEWHERE: dict[str, dict[str, str]] = {
    f"{FEATURES}/deadlock.py": {
        'module: ( Row( "deadlock.schedule", "vllm.v1.core.sched.scheduler:Sc ... '
        'with loaded blocks", ), ) -> ()': (
            "engines without the row stand still: scripts/matrix without deadlock.schedule"
        ),
    },
    f"{FEATURES}/offloading/model_rules.py": {
        f"module: (place.ALONE, SEVERAL_RANKS) -> ({left},)": (
            "what a sentence says of the releases: tests/unit/test_docs.py"
        )
        for left in ("place.ALONE", "SEVERAL_RANKS")
    },
}


def of(module: str) -> dict[str, dict[str, str]]:
    """Return the verdict of each mutant of a module, and why."""
    tables = {"equivalent": EQUIVALENT, "elsewhere": ELSEWHERE}
    return {
        mutant: {"verdict": name, "why": why}
        for name, table in tables.items()
        for mutant, why in table.get(module, {}).items()
    }
