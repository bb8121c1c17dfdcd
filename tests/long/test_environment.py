"""No variable is added to an engine's environment while kvcached's threads may read it."""

import re
import subprocess

import pytest

from harness.engines.runs import Run, prompts

# Tells of every variable that is set, and whether it was there; the C library's call does it.
TELLS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int setenv(const char *name, const char *value, int overwrite) {
  static int (*real)(const char *, const char *, int);
  if (!real)
    real = (int (*)(const char *, const char *, int))dlsym(RTLD_NEXT, "setenv");
  fprintf(stderr, "%s variable %s\n", getenv(name) ? "known" : "new", name);
  return real(name, value, overwrite);
}
"""
BEGUN = "Init C++ PageAllocator"  # the threads start after it


@pytest.fixture
def tells(tmp_path):
    source, library = tmp_path / "tells.c", tmp_path / "tells.so"
    source.write_text(TELLS)
    command = ["g++", "-x", "c", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return library


@pytest.mark.parametrize("reverted", [False, True], ids=["kvpatch", "without the row"])
def test_an_engine_adds_no_variable_after_kvcacheds_threads_have_started(serve, tells, reverted):
    run = Run(revert=("elastic_memory.environment",) if reverted else ())
    ended = serve(run.within({"LD_PRELOAD": str(tells)}), rounds=[prompts(1)])
    ended.round(0)
    before, begun, after = ended.log.partition(BEGUN)
    assert begun
    assert "new variable" in before, "the library was not loaded"
    added = re.findall(r"^new variable (\S+)", after, re.MULTILINE)
    assert added == (["VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME"] if reverted else [])
