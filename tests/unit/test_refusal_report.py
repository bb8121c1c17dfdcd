"""A refusal holds, leaves nothing applied behind, and is the last line the operator sees."""

import pytest
from fakes import raising

from kvpatch import gate, refusal_report
from kvpatch.environ import REFUSAL_FILE, STATUS_DIR
from kvpatch.refusal import Halted, Refusal, RefusedCall
from kvpatch.telemetry import refusals
from kvpatch.versions import Installed

BROKEN = """
import kvpatch, fake_patches, sys
from kvpatch import patches
good = patches.FEATURES[0]
bad = good._replace(name="bad", wanted=None, seams=(
    good.patches[0]._replace(id="bad.first", target="vllm.serving:Server.stop", parameters=()),
))
sys.modules["script"] = sys.modules["__main__"]
"""


def test_every_later_import_is_refused(python):
    code = """
import kvpatch, sys
for name in ("vllm", "vllm", "vllm.serving"):
    try:
        __import__(name)
    except ImportError as error:
        print(error)
try:
    from vllm.serving import Server
except ImportError as error:
    print(error)
print([name for name in sys.modules if name.startswith("vllm")])
"""
    out = python(code, KVPATCH="banana").out.splitlines()
    assert out[-1] == "[]"
    assert len(out) == 5
    assert len(set(out[:-1])) == 1
    assert out[0].startswith("kvpatch refuses to start vLLM: KVPATCH=banana is not a known value")


def test_a_refusal_holds_when_its_cause_is_gone(python):
    code = """
import kvpatch, fake_patches, os
for value in ("banana", "1"):
    os.environ["KVPATCH"] = value
    try:
        import vllm
    except ImportError as error:
        print(error)
"""
    first, second = python(code).out.splitlines()
    assert first == second
    assert "KVPATCH=banana is not a known value" in first


def test_a_refusal_after_vllm_ran_takes_every_feature_back(python):
    code = (
        BROKEN
        + """
kept = {}
def before():
    import vllm.serving
    kept["Server"] = vllm.serving.Server
    kept["original"] = vllm.serving.Server.__dict__["serve"]
    return True
def between():
    kept["patched"] = kept["Server"].__dict__["serve"] is not kept["original"]
    return True
patches.FEATURES = (good._replace(wanted="script:before"), bad._replace(wanted="script:between"))
for again in range(2):
    try:
        from vllm.serving import Server
    except ImportError as error:
        print(error)
print(kept["patched"], kept["Server"].__dict__["serve"] is kept["original"])
print([name for name in sys.modules if name.startswith("vllm")])
"""
    )
    done = python(code)
    sentence = (
        "kvpatch refuses to start vLLM: the feature bad cannot be applied (absent), because "
        "vllm.serving:Server.stop does not exist; install versions from "
        "docs/support.md, or set KVPATCH=0. [KVP201]"
    )
    assert done.err == ""
    assert done.out.splitlines() == [sentence, sentence, "True True", "[]"]


def test_an_error_of_our_own_is_a_refusal_too(python):
    code = BROKEN + "patches.FEATURES = (good._replace(wanted='nowhere:nothing'),)\nimport vllm"
    done = python(code)
    assert done.code == 1
    assert done.err == (
        "kvpatch refuses to start vLLM: kvpatch could not be applied, because it failed with "
        "ModuleNotFoundError: No module named 'nowhere'; report this with your versions, or set "
        "KVPATCH=0. [KVP202]\n"
    )


def test_patches_under_somebody_elses_are_reported(python):
    code = (
        BROKEN
        + """
def cover():
    import vllm.serving
    vllm.serving.Server.serve = lambda self, request: "theirs"
    return True
patches.FEATURES = (good, bad._replace(wanted="script:cover"))
import vllm
"""
    )
    done = python(code)
    assert done.code == 1
    reported, sentence = done.err.splitlines()
    assert reported == ("kvpatch: not reverted, because others have patched over them: fake.serve")
    assert sentence.startswith("kvpatch refuses to start vLLM: the feature bad cannot be applied")


@pytest.fixture
def newer(fakes):
    """Make the fake vllm look installed in a version that nobody has seen."""
    old = fakes / "vllm-0.28.0.dist-info/METADATA"
    old.write_text(old.read_text().replace("0.28.0", "0.99.1"))


def test_a_vllm_that_is_not_validated_and_is_named_starts_with_a_warning(python, newer):
    code = "import kvpatch, fake_patches, vllm.serving\nprint(vllm.serving.Server().serve('it'))"
    refused = gate.check_installed("vllm", [Installed.release("vllm", "0.99.1")], {})
    assert python(code).err == f"{refused}\n"
    assert refused.code == "KVP107"
    assert python(code, KVPATCH_ALLOW_VLLM="0.99.0").code == 1
    done = python(code, KVPATCH_ALLOW_VLLM="0.99.1")
    assert done.out == "patched it\n"
    assert done.err == (
        "kvpatch: vllm 0.99.1 is NOT VALIDATED and starts because KVPATCH_ALLOW_VLLM names it\n"
    )


def test_a_vllm_that_is_named_is_refused_when_a_target_moved(python, fakes, newer):
    serving = fakes / "vllm/serving.py"
    serving.write_text(serving.read_text().replace("request", "job"))
    done = python("import kvpatch, fake_patches, vllm", KVPATCH_ALLOW_VLLM="0.99.1")
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith(
        "kvpatch refuses to start vLLM: the feature fake cannot be applied (moved), because "
        "vllm.serving:Server.serve no longer takes request; "
    )


ENGINE = """
import os, multiprocessing, sys
import kvpatch, fake_patches, vllm
from kvpatch.refusal import Refusal
from kvpatch.refusal_report import report

def engine(refuses):
    if refuses:
        multiprocessing.get_context("{method}").Process(target=worker).start()

def worker():
    report(Refusal("a is b", "c is d", "do e"))  # as the guard of every wrapper does
    report(Refusal("a later one", "of another rank", "do f"))

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

    def end(refuses, end, method="spawn"):
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


def test_making_a_refusal_has_no_side_effect(python, tmp_path):
    code = """
import os
from kvpatch.refusal import Refusal
from kvpatch.refusal_report import in_one_line
in_one_line()
Refusal("a is b", "c is d", "do e")
print(os.path.exists(os.environ["KVPATCH_REFUSAL_FILE"]))
"""
    assert python(code, TMPDIR=str(tmp_path)).out == "False\n"
    assert not list(tmp_path.glob("kvpatch-*"))


@pytest.mark.parametrize(
    ("kind", "left", "known"),
    [
        (Refusal, SENTENCE, SENTENCE),
        # The process that the operator started would name it when it ends by something else.
        (RefusedCall, "", "kvpatch refuses the call: a is b, because c is d; do e. [KVP000]"),
        (Halted, "kvpatch ends the engine: a is b, because c is d; do e. [KVP000]", None),
    ],
)
def test_what_a_wrapper_raises_is_reported_and_passed_on(tmp_path, monkeypatch, kind, left, known):
    path = tmp_path / "kvpatch-refusal-1-of-the-first-process"
    monkeypatch.setenv(REFUSAL_FILE.name, str(path))
    monkeypatch.setenv(STATUS_DIR.name, str(tmp_path))
    with pytest.raises(kind):
        refusal_report.guard(raising(kind("a is b", "c is d", "do e")))(None, None, (), {})
    assert (path.read_text() if path.exists() else "") == left
    if known is not None:
        assert [one["sentence"] for one in refusals.recent()] == [known]
