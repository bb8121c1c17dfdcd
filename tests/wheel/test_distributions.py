"""What is in the wheels: kvpatch for every machine, and beside it the host device and Ascend."""

import ast
import json
import re
import zipfile
from pathlib import Path

import pytest

from kvpatch import distributions
from kvpatch.version import VERSION

ROOT = Path(__file__).parents[2]
HOST, NPU = "kvpatch/hostdevice/", "kvpatch/ascend/"
# What a distribution has of the package; its rows are among the features of every machine.
OF_HOST = (HOST, "kvpatch/patches/host_copies.py", "kvpatch/patches/host_device/")
OF_NPUS = (NPU, "kvpatch/patches/ascend/")


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def sources(folder: Path) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in folder.rglob("*.py")}


def part(every: set[str], of: tuple[str, ...]) -> set[str]:
    return {name for name in every if name.startswith(of)}


def test_kvpatch_has_nothing_of_the_others(wheel):
    assert not part(names(wheel), OF_HOST + OF_NPUS)
    assert not {name for name in names(wheel) if "/torch/" in name}


def test_kvpatch_has_everything_else(wheel):
    every = sources(ROOT / "kvpatch")
    wanted = every - part(every, OF_HOST + OF_NPUS) - sources(ROOT / "kvpatch/startup")
    assert {name for name in names(wheel) if name.endswith(".py")} == wanted | {
        "kvpatch_startup.py"
    }


def test_type_checkers_read_kvpatch(wheel):
    assert "kvpatch/py.typed" in names(wheel)


def test_what_is_for_npus_has_its_files_and_no_emulator_of_one(wheel, npu_wheel):
    assert [name for name in names(wheel) if name.endswith((".h", ".cpp", ".map"))] == []
    headers = {name for name in names(npu_wheel) if name.endswith((".h", ".cpp", ".map"))}
    assert headers == {f"{NPU}include/cuda.h", f"{NPU}include/cuda_runtime.h"}


def test_kvpatch_has_no_other_package(wheel):
    """A dist-info or a torch in it would be found by pip, or imported."""
    tops, info = {name.partition("/")[0] for name in names(wheel)}, f"kvpatch-{VERSION}.dist-info"
    startup = {"kvpatch-init.pth", "kvpatch-init.start", "kvpatch_startup.py"}
    assert tops == {"kvpatch", info} | startup
    others = {name for name in names(wheel) if not name.startswith(f"{info}/")}
    assert not {name for name in others if ".dist-info" in name}


@pytest.mark.parametrize(("one", "of"), [("host_wheel", OF_HOST), ("npu_wheel", OF_NPUS)])
def test_each_beside_kvpatch_has_its_files_and_no_other(request, one, of):
    every = names(request.getfixturevalue(one))
    found = {name for name in every if ".dist-info/" not in name or of[0] in name}
    assert found == part(found, of)
    assert {name for name in found if name.endswith(".py")} == part(sources(ROOT / "kvpatch"), of)
    assert {f"{of[0]}include/cuda.h", f"{of[0]}LICENSE"} <= found


def test_the_host_device_has_the_emulated_npu(host_wheel):
    assert {
        f"{HOST}acl/include/acl/acl.h",
        f"{HOST}acl/memory.cpp",
        f"{HOST}acl/exports.map",
    } <= names(host_wheel)


@pytest.mark.parametrize("one", ["host_wheel", "npu_wheel"])
def test_each_needs_the_kvpatch_that_it_was_built_with(request, one):
    wheel = request.getfixturevalue(one)
    (metadata,) = [name for name in names(wheel) if name.endswith("0.dist-info/METADATA")]
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    assert re.findall("^Version: (.*)$", text, re.M) == [VERSION]
    assert f"Requires-Dist: kvpatch=={VERSION}" in text


LOOK = "from importlib.util import find_spec; print(find_spec('kvpatch.hostdevice') is not None)"


def test_both_install_beside_each_other(fresh, run, host_wheel):
    assert run(fresh.python, "-c", LOOK).out == "False\n"
    fresh.pip("install", "--quiet", "--no-deps", host_wheel)
    assert run(fresh.python, "-c", LOOK).out == "True\n"
    code = "from kvpatch.hostdevice import ledger; print(ledger.device_size())"
    done = run(fresh.python, "-c", code, KVPATCH="0", KVPATCH_HOST_DEVICE="4MiB")
    assert (done.out, done.err) == (f"{4 << 20}\n", "")
    fresh.pip("uninstall", "--quiet", "--yes", "kvpatch-hostdevice")
    assert run(fresh.python, "-c", LOOK).out == "False\n"
    assert run(fresh.python, "-m", "kvpatch", "--version").out == f"kvpatch {VERSION}\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("doctor", 1),
        ("matrix", 0),
        ("matrix --rows", 0),
        ("status", 1),
        ("dashboard", 0),
        ("dashboard --alerts", 0),
    ],
)
def test_every_command_runs_without_the_host_device(fresh, run, command, code):
    """And without torch."""
    done = run(fresh.python, "-m", "kvpatch", *command.split())
    assert (done.code, done.err) == (code, "")


# What a distribution names, it has

# On a GPU, by vllm.platforms: each feature is asked whether it is wanted, what it names is found,
# and the rules are asked about every cell of every release.
EACH_FEATURE = """
import ast, importlib.util, json, os
from kvpatch import activation, gate, patches, rules, supported
from harness.matrix import axes, shapes
from kvpatch.patch import load
from kvpatch.versions import Facts, Installed

activation.require_distributions()
kvcached = Installed.release("kvcached", supported.KVCACHED[-1])
recorded = shapes.releases("kvcached")[kvcached.text]
every, lacking = rules.of(one.rules for one in patches.FEATURES), []

def defines(reference):
    module, _, name = reference.partition(":")
    tree = ast.parse(open(importlib.util.find_spec(module).origin).read())
    return name in {getattr(node, "name", None) for node in tree.body}

for text in supported.validated():
    vllm = Installed.release("vllm", text)
    release = supported.release_of(vllm)
    facts = Facts(vllm, kvcached, os.environ, device="cuda")
    gate.require(patches.FEATURES, facts)
    look = shapes.look(shapes.releases("vllm")[text], recorded)
    for feature in patches.FEATURES:
        if release not in feature.span:
            continue
        if feature.prepare is not None:
            load(feature.prepare)()
        verdict = gate.check_feature(feature, vllm, look)
        said = gate.unresolved(feature, release) or gate.refusal(feature, verdict)
        if said:
            lacking.append(f"{text} {feature.name}: {said}")
        lacking += [patch.id for patch in feature.at(release) if not defines(patch.wrapper)]
    for cell in axes.cells(text):
        rules.check(axes.configuration_of(cell), facts, every)
whose = sorted({one.distribution for one in patches.FEATURES})
print(json.dumps([[one.name for one in patches.FEATURES], whose, lacking]))
"""


def test_every_feature_resolves_on_every_release_without_the_host_device(alone, run):
    environment, variables = alone
    paths = [*variables.values(), str(ROOT / "scripts")]  # the recorded signatures
    done = run(environment.python, "-c", EACH_FEATURE, KVPATCH="0", PYTHONPATH=":".join(paths))
    assert (done.code, done.err) == (0, "")
    features, whose, lacking = json.loads(done.out.splitlines()[-1])
    assert lacking == []
    assert whose == ["kvpatch"]
    assert not {"ascend", "host-copies", "host-device", "host-device-sleep"} & set(features)


def test_with_the_others_their_features_come_before_what_uses_them(
    fresh, run, host_wheel, npu_wheel
):
    fresh.pip("install", "--quiet", "--no-deps", host_wheel, npu_wheel)
    code = "from kvpatch import patches; print(*[one.name for one in patches.FEATURES[1:6]])"
    done = run(fresh.python, "-c", code, KVPATCH="0")
    names = "ascend host-copies host-device host-device-sleep kvcached-adapters\n"
    assert (done.out, done.err) == (names, "")


def test_without_what_is_for_npus_vllm_ascend_is_refused(fresh, run):
    info = fresh.site / "vllm_ascend-0.23.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-ascend\nVersion: 0.23.0\n")
    code = "from kvpatch import activation\nactivation.require_distributions()"
    done = run(fresh.python, "-c", code, KVPATCH="0")
    assert "a distribution of its own, kvpatch-ascend, and is not installed" in done.last_line
    assert done.last_line.endswith("[KVP607]")


def test_doctor_finds_what_a_feature_names_and_is_not_there(fresh, run):
    """A start would end there, with KVP202."""
    info = fresh.site / "kvcached-0.1.6.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcached\nVersion: 0.1.6\n")
    vllm = fresh.site / "vllm-0.17.9.dist-info"
    (vllm / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    vllm.rename(fresh.site / "vllm-0.32.0.dist-info")
    assert "would not apply" not in run(fresh.python, "-m", "kvpatch", "doctor").out
    (fresh.site / "kvpatch/patches/fence/hooks.py").unlink()
    done = run(fresh.python, "-m", "kvpatch", "doctor")
    assert done.code == 1
    assert "fence: would not apply, there is no kvpatch.patches.fence.hooks" in done.out


REFERENCE = re.compile(r"kvpatch(\.\w+)+(:\w+(\.\w+)*)?")


def modules(every: set[str]) -> set[str]:
    """The modules and packages that the files of a wheel are."""
    names = {name.removesuffix(".py").removesuffix("/__init__") for name in every}
    return {name.replace("/", ".") for name in names}


def named(source: str) -> set[str]:
    """The modules of kvpatch that a file imports, or names in a whole text."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvpatch"):
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {one.name for one in node.names if one.name.startswith("kvpatch")}
        elif isinstance(node, ast.Constant) and REFERENCE.fullmatch(str(node.value)):
            found.add(str(node.value).partition(":")[0])
    return found


def test_of_the_matrix_the_wheel_has_verdicts_and_no_evidence(wheel):
    found = {name.removeprefix("kvpatch/matrix/") for name in names(wheel) if "/matrix/" in name}
    assert found == {"__init__.py", "tables.py", "verdicts.py", "verdicts.json"}
    assert [name for name in names(wheel) if name.endswith(".json") and "vllm-" in name] == []


def test_no_file_of_kvpatch_names_a_module_that_it_has_not(wheel):
    archive = zipfile.ZipFile(wheel)
    sources = {name for name in names(wheel) if name.endswith(".py")}
    there = modules(names(wheel))
    others = {distributions.FEATURES, distributions.SPECS, distributions.ACL}
    others |= {distributions.PROBES, "kvpatch.log"}
    lacking = {
        (name, one)
        for name in sources
        for one in named(archive.read(name).decode()) - there - others
    }
    assert lacking == set()


@pytest.mark.parametrize(
    ("settings", "cpu", "sentence"),
    [
        ({}, True, "this machine has no GPU, because the host device is a distribution of its own"),
        ({"KVPATCH_HOST_DEVICE": "2GiB"}, False, "KVPATCH_HOST_DEVICE is set, because the host"),
    ],
    ids=["on a CPU", "asked for"],
)
def test_without_the_host_device_vllm_is_refused_where_it_is_needed(
    fresh, run, settings, cpu, sentence
):
    code = "from kvpatch import activation\nactivation.require_distributions()"
    platforms = fresh.site / "vllm/platforms.py"
    platforms.write_text(
        platforms.read_text().replace("is_cpu=lambda: False", f"is_cpu=lambda: {cpu}")
    )
    done = run(fresh.python, "-c", code, KVPATCH="0", **settings)
    assert sentence in done.last_line
    assert done.last_line.endswith("[KVP504]")
