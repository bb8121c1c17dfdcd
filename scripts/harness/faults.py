"""docs/faults.md: every fault that a test makes, what happens then, and the test.

A test says it itself, with ``@pytest.mark.fault(what, then)``; those of a file are a section, under
the first line of the file. ``ELSEWHERE`` names tests of other lanes, which show more than a fault.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import ROOT

TESTS = ROOT / "tests"
# By section: the fault, what happens, and the test.
ELSEWHERE = {
    "Block files and disks": (
        (
            "a block file is truncated, and the block is computed again",
            "a miss; the file is removed and stored again",
            "test_a_file_that_is_not_what_was_stored_is_a_miss_and_is_stored_again",
        ),
        (
            "one bit of a block file has changed",
            "a miss; the file is removed and stored again",
            "test_a_file_that_is_not_what_was_stored_is_a_miss_and_is_stored_again",
        ),
        (
            "a block file lies in the place of another block's",
            "a miss; the file is removed and stored again",
            "test_a_file_that_is_not_what_was_stored_is_a_miss_and_is_stored_again",
        ),
        (
            "somebody removes the tier's folder",
            "misses; it is made again",
            "test_a_folder_that_was_removed_is_a_miss_and_is_made_again",
        ),
        (
            "a write ends in the middle of a block",
            "no file and no part of one; the block is found in the CPU tier",
            "test_a_full_disk_loses_blocks_and_nothing_else",
        ),
        (
            "a disk hangs in a read",
            "it is passed over after the patience until it answers",
            "test_a_disk_that_hangs_while_reading_is_passed_over_until_it_answers",
        ),
        (
            "a disk hangs when it is asked which files there are",
            "it is passed over, also by a shutdown",
            "test_a_disk_that_hangs_when_asked_for_files_is_passed_over",
        ),
        (
            "a request is aborted while the disk is asked for its blocks",
            "two answers about one block do not end the engine",
            "test_two_answers_about_one_block_do_not_end_the_engine",
        ),
        (
            "the disk of a running engine is truncated, damaged, removed, full, hung, and back",
            "the tokens of plain vLLM after each",
            "test_after_a_fault_of_the_disk_the_tokens_are_right",
        ),
        (
            "any call to the disk fails, in turn, for all of them",
            "the block is a miss; nothing else is lost",
            "test_every_call_to_the_disk_fails_in_turn",
        ),
        (
            "a slow disk has a backlog of more than the patience",
            "what waits in the queue makes no tier late",
            "test_what_waits_in_the_queue_makes_no_tier_late",
        ),
        (
            "an engine was killed while it wrote a block",
            "the next one removes what was being written",
            "test_what_a_killed_engine_was_writing_is_swept_at_the_next_start",
        ),
        (
            "the weights of a running engine are replaced",
            "no block of the old ones is found, in no tier",
            "test_weights_that_are_replaced_find_no_block_of_the_old_ones",
        ),
        (
            "a prompt is larger than the CPU tier",
            "it gets the blocks that fit",
            "test_a_prompt_larger_than_the_cpu_tier_gets_what_fits",
        ),
    ),
    "Object stores": (
        (
            "an object is damaged, or lies in the place of another block's",
            "a miss; the block is computed again",
            "test_an_object_that_is_not_what_was_stored_is_a_miss",
        ),
        (
            "a transfer of blocks or seals fails",
            "a miss; the engine goes on, and stores again",
            "test_a_transfer_that_fails_is_a_block_that_is_computed_again",
        ),
        (
            "a store cannot be submitted to NIXL: its blocks, or its seals afterwards",
            "a miss; the job has ended, and no reset waits for it",
            "test_a_store_that_cannot_be_submitted_is_a_block_that_is_not_there",
        ),
        (
            "a load cannot be submitted to NIXL: its blocks, or its seals",
            "a miss; what was submitted has ended before its memory is another's",
            "test_a_load_that_cannot_be_submitted_is_a_block_that_is_computed_again",
        ),
        (
            "the store does not answer",
            "it is passed over after the patience until it answers",
            "test_a_store_that_does_not_answer_is_not_used",
        ),
    ),
    "Memory and copies": (
        (
            "the device is full",
            "an allocation is refused, and the device stays usable",
            "test_a_full_device_refuses_a_page_and_stays_usable",
        ),
        (
            "an allocation fails between two groups of KV cache",
            "its blocks are given back and the request waits",
            "test_a_failed_allocation_leaves_nothing_behind",
        ),
        (
            "a copy fails",
            "its event has the error; the next copy runs",
            "test_a_failed_copy_is_reported_and_the_next_one_runs",
        ),
        (
            "a page is to be unmapped under a copy that is held",
            "it stays mapped until the copy has ended",
            "test_with_the_fence_every_stored_block_is_right",
        ),
        (
            "a process forks while it has memory of the device",
            "the child leaves it alone",
            "test_a_forked_child_leaves_its_parents_memory_alone",
        ),
        (
            "another engine takes and gives back memory of the device",
            "each gets what the other gave back",
            "test_a_neighbour_takes_what_an_engine_gave_back",
        ),
    ),
    "Processes": (
        (
            "kill -9 of the engine or of a worker while copies are held",
            "the server ends; the next one of that name starts and is right",
            "test_the_next_engine_of_that_name_starts_and_is_right",
        ),
        (
            "an engine is stopped (SIGSTOP)",
            "status says stopped",
            "test_an_engine_that_is_stopped",
        ),
        ("an engine hangs", "status says stuck or silent", "test_an_engine_that_hangs"),
        (
            "an engine was killed",
            "status says gone, and doctor names what it left",
            "test_an_engine_that_was_killed",
        ),
        (
            "the demo is interrupted while it starts or works",
            "no process, file or memory is left",
            "test_an_interrupted_demo_leaves_nothing",
        ),
        (
            "requests, aborts, trims, moved limits, resets and neighbours at random",
            "plain vLLM's tokens; no block, page, descriptor or thread is left",
            "test_a_cut_of_it_leaves_nothing_wrong_and_nothing_behind",
        ),
    ),
    "Names and pages": (
        (
            "two engines have one engine_id",
            "the second is refused",
            "test_a_second_engine_with_the_same_engine_id_is_refused",
        ),
        (
            "two engines with one engine_id start at the same moment",
            "one of them is refused",
            "test_two_engines_with_one_engine_id_that_start_together",
        ),
        (
            "the name of a CPU tier with tiers behind it is removed from /dev/shm (a logout with "
            "RemoveIPC=yes, a cleaner) while its engine starts, before the scheduler maps it",
            "the engine is refused; the scheduler makes no second file, of which a tier would "
            "store zeros",
            "test_a_scheduler_that_finds_no_region_makes_none",
        ),
        (
            "another file has that name by then",
            "the engine is refused",
            "test_a_scheduler_that_maps_another_file_than_its_workers_is_refused",
        ),
        (
            "the name is removed between two workers, which map two files",
            "the engine is refused",
            "test_workers_that_map_two_files_are_refused",
        ),
        (
            "a container with namespaces of its own takes a name in a shared /dev/shm",
            "the name is seen as taken",
            "test_a_container_with_its_own_namespaces_sees_the_claim",
        ),
        (
            "kill -9 of an engine that holds a name",
            "the name is free, and nothing stays",
            "test_a_killed_engine_holds_nothing_and_leaves_nothing",
        ),
        (
            "/dev/shm is full when kvcached's segment is made",
            "the engine is refused",
            "test_a_full_shm_is_a_refusal",
        ),
        (
            "several engines are started by one program",
            "they do not share a limit",
            "test_engines_that_one_program_starts_together_do_not_share_a_limit",
        ),
        (
            "the folder of status pages could be used by others",
            "it is refused",
            "test_a_folder_is_its_users_alone",
        ),
        (
            "a process cannot publish its status",
            "it goes on",
            "test_a_process_that_cannot_publish_goes_on",
        ),
        (
            "the n-th call of the status page or of the refusals file fails, for all n",
            "the engine goes on, and a refusal is the refusal",
            "test_whichever_call_fails_the_engine_goes_on_and_a_refusal_is_the_refusal",
        ),
        (
            "/dev/shm is full before or while a page is written",
            "the page is not published; the process goes on",
            "test_a_full_dev_shm_does_not_end_the_process",
        ),
        (
            "any bytes lie in the place of a status page",
            "status says that it is no page",
            "test_any_bytes_may_be_a_page",
        ),
        (
            "another user has made the folder of status pages",
            "nothing in it is read",
            "test_a_folder_that_another_user_made_is_not_read",
        ),
        (
            "the page of a running engine is removed, as at its user's logout",
            "it is made again",
            "test_a_page_whose_name_was_removed_is_made_again",
        ),
        (
            "a crash loop leaves more pages than are read",
            "processes that run stay in sight",
            "test_engines_that_run_stay_in_sight_beside_the_pages_of_a_crash_loop",
        ),
        (
            "engines beside the one that is named do not answer",
            "it is asked without them",
            "test_an_engine_is_asked_by_its_name_without_the_others",
        ),
        (
            "two containers with process ids of their own share /dev/shm",
            "neither removes or misreads the pages of the other",
            "test_two_containers_that_share_the_folder",
        ),
    ),
}


@dataclass(frozen=True)
class Fault:
    """A row: what is broken, what happens then, the test, and its lane."""

    what: str
    then: str
    test: str
    lane: str


def _marks(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    for decorator in function.decorator_list:
        for node in ast.walk(decorator):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                what, then = (ast.literal_eval(argument) for argument in node.args)
                yield what, then


def sections(tests: Path = TESTS) -> dict[str, list[Fault]]:
    """Return the faults by section.

    Raises:
        LookupError: a test of ``ELSEWHERE`` does not exist.
    """
    found: dict[str, list[Fault]] = {}
    lanes: dict[str, str] = {}
    for path in sorted(tests.rglob("test_*.py")):
        module, lane = ast.parse(path.read_text()), path.relative_to(tests).parts[0]
        title = (ast.get_docstring(module) or "").partition("\n")[0].rstrip(".")
        for node in module.body:
            if not isinstance(node, ast.FunctionDef):
                continue
            lanes[node.name] = lane
            for what, then in _marks(node):
                found.setdefault(title, []).append(Fault(what, then, node.name, lane))
    for title, rows in ELSEWHERE.items():
        for what, then, test in rows:
            if test not in lanes:
                raise LookupError(f"{test} of docs/faults.md does not exist")
            found.setdefault(title, []).append(Fault(what, then, test, lanes[test]))
    return found
