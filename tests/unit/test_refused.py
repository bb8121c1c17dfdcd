"""A refusal holds, and leaves nothing applied behind."""

from __future__ import annotations

from kvpatch.gate import in_words
from kvpatch.registry import VLLM_RANGE

BROKEN = """
import kvpatch, fake_registry, sys
from dataclasses import replace
from kvpatch import registry
good = registry.FEATURES[0]
bad = replace(good, name="bad", wanted=None, patches=(
    replace(good.patches[0], id="bad.first", target="vllm.serving:Server.stop", parameters=()),
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
    assert out[0].startswith("kvpatch refuses to start vLLM: KVPATCH=banana is not a value")


def test_a_refusal_holds_when_its_cause_is_gone(python):
    code = """
import kvpatch, fake_registry, os
for value in ("banana", "1"):
    os.environ["KVPATCH"] = value
    try:
        import vllm
    except ImportError as error:
        print(error)
"""
    first, second = python(code).out.splitlines()
    assert first == second
    assert "KVPATCH=banana is not a value" in first


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
registry.FEATURES = (replace(good, wanted="script:before"), replace(bad, wanted="script:between"))
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
    code = BROKEN + "registry.FEATURES = (replace(good, wanted='nowhere:nothing'),)\nimport vllm"
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
registry.FEATURES = (good, replace(bad, wanted="script:cover"))
import vllm
"""
    )
    done = python(code)
    assert done.code == 1
    reported, sentence = done.err.splitlines()
    assert reported == ("kvpatch: not reverted, because others have patched over them: fake.serve")
    assert sentence.startswith("kvpatch refuses to start vLLM: the feature bad cannot be applied")


def test_an_untested_vllm_that_is_named_runs_and_says_so(python, fakes):
    old = fakes / "vllm-0.28.0.dist-info/METADATA"
    old.write_text(old.read_text().replace("0.28.0", "0.99.1"))
    code = "import kvpatch, fake_registry, vllm.serving\nprint(vllm.serving.Server().serve('it'))"
    assert python(code).err == (
        "kvpatch refuses to start vLLM: vllm 0.99.1 is outside the tested range, because no "
        "engine on it was compared with plain vLLM's in full; install vllm "
        f"{in_words(VLLM_RANGE)}, set "
        "KVPATCH_ALLOW_VLLM=0.99.1 to try it untested, or set KVPATCH=0. [KVP107]\n"
    )
    assert python(code, KVPATCH_ALLOW_VLLM="0.99.0").code == 1
    done = python(code, KVPATCH_ALLOW_VLLM="0.99.1")
    assert done.out == "patched it\n"
    assert done.err == (
        "kvpatch: vllm 0.99.1 is UNTESTED and runs because KVPATCH_ALLOW_VLLM names it\n"
    )


def test_an_untested_vllm_that_is_named_is_refused_when_a_target_moved(python, fakes):
    old = fakes / "vllm-0.28.0.dist-info/METADATA"
    old.write_text(old.read_text().replace("0.28.0", "0.99.1"))
    serving = fakes / "vllm/serving.py"
    serving.write_text(serving.read_text().replace("request", "job"))
    done = python("import kvpatch, fake_registry, vllm", KVPATCH_ALLOW_VLLM="0.99.1")
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith(
        "kvpatch refuses to start vLLM: the feature fake cannot be applied (moved), because "
        "vllm.serving:Server.serve no longer takes request; "
    )
