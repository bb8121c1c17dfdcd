"""A refusal is one sentence, in every process it travels to."""

from __future__ import annotations

import pickle

import pytest

from kvpatch.refusal import Refusal, RefusedImport

SENTENCE = "kvpatch refuses to start vLLM: a is b, because c is d; do e. [KVP404]"


@pytest.mark.parametrize("kind", [Refusal, RefusedImport])
def test_it_is_one_sentence_and_survives_pickling(kind):
    refusal = pickle.loads(pickle.dumps(kind("a is b", "c is d", "do e", code="KVP404")))
    assert type(refusal) is kind
    assert str(refusal) == SENTENCE
    assert (refusal.what, refusal.why, refusal.remedy) == ("a is b", "c is d", "do e")
    assert refusal.code == "KVP404"


def test_a_quoted_error_of_many_lines_stays_one_line():
    assert str(Refusal("a", "it failed with X: one\n  two\n", "do e", code="KVP404")) == (
        "kvpatch refuses to start vLLM: a, because it failed with X: one two ; do e. [KVP404]"
    )


def test_kvcached_passes_it_on_and_imports_know_it():
    # kvcached logs and drops what is not a RuntimeError.
    assert issubclass(Refusal, RuntimeError)
    assert not issubclass(Refusal, ImportError)
    refused = RefusedImport.of(Refusal("a is b", "c is d", "do e", code="KVP404"))
    assert isinstance(refused, ImportError)
    assert isinstance(refused, Refusal)
    assert refused.name == "vllm"
    assert str(refused) == SENTENCE
