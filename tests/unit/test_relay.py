"""A refusal in a process that vLLM started is the last line of the operator's."""

from __future__ import annotations

import pytest

ENGINE = """
import os, multiprocessing, sys
import kvpatch, fake_registry, vllm
from kvpatch.errors import Refusal

def engine(refuses):
    if refuses:
        multiprocessing.get_context("{method}").Process(target=worker).start()

def worker():
    try:
        raise Refusal("a is b", "c is d", "do e")
    except Refusal:
        pass  # vLLM logs it
    Refusal("a later one", "of another rank", "do f")

if __name__ == "__main__":
    process = multiprocessing.get_context("{method}").Process(target=engine, args=({refuses},))
    process.start()
    process.join()
    {end}
"""
SENTENCE = "kvpatch refuses to start vLLM: a is b, because c is d; do e. [KVP000]"


@pytest.fixture
def end(python, tmp_path):
    """Run an engine that refuses or not; return how the first process ended."""
    folder = tmp_path / "temporary"
    folder.mkdir()

    def end(refuses: bool, end: str, method: str = "spawn"):
        code = ENGINE.format(refuses=refuses, end=end, method=method)
        done = python(code, TMPDIR=str(folder))
        assert list(folder.glob("kvpatch-*")) == []
        return done

    return end


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_the_first_sentence_is_said_after_the_error_it_caused(end, method):
    done = end(True, "raise RuntimeError('Engine core initialization failed')", method)
    assert done.code == 1
    error, sentence = done.err.splitlines()[-2:]
    assert error == "RuntimeError: Engine core initialization failed"
    assert sentence == SENTENCE


def test_nothing_is_added_to_errors_without_a_refusal(end):
    done = end(False, "raise RuntimeError('Engine core initialization failed')")
    assert done.last_line == "RuntimeError: Engine core initialization failed"


def test_a_program_that_goes_on_leaves_nothing_behind(end):
    done = end(True, "print('went on')")
    assert (done.code, done.out, done.err) == (0, "went on\n", "")


def test_the_first_process_says_its_own_sentence_once(end):
    done = end(False, "raise Refusal('a is b', 'c is d', 'do e')")
    assert (done.code, done.err) == (1, SENTENCE + "\n")
