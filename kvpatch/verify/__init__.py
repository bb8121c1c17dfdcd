"""``kvpatch verify -- vllm serve ...``: evidence for one command on this machine.

    run          the order of a run
    child        the command as a child process
    api          what is asked of it over HTTP
    load         the prompts
    drive        the phases that make it evict, restore, preempt and abort
    limit        kvcached's limit, moved from outside
    readings     what the engine and its workers say of themselves
    plain        the same command without kvpatch
    compare      the answers of both
    judge        what is wrong, and what was not shown

Nothing of vllm, torch or kvcached is imported here. ``kvpatch.verdicts`` has the files that a
run leaves.
"""
