"""What is below the patches of a release, and the releases that share runs because of it."""

import pytest
from packaging.version import Version

from harness.matrix import below, sharing
from harness.matrix.signatures import Sources
from kvpatch import patches, supported
from kvpatch.patch import Patch, Seam

SOURCES = {
    "vllm/v1/core/pool.py": '''
from vllm.v1.core import helper
from vllm.utils import rounded

LIMIT = 3


class Pool:
    """A pool."""

    kept = LIMIT

    def __init__(self):
        self.blocks = []

    def take(self, count):
        """Take blocks."""
        return helper.first(self.blocks, rounded(count))

    def never_called(self):
        return 1
''',
    "vllm/v1/core/helper.py": "def first(blocks, count):\n    return blocks[:count].drain()\n",
    "vllm/v1/core/queue.py": "class Queue:\n    def drain(self):\n        return self\n",
    "vllm/utils.py": "def rounded(count):\n    return count\n\n\ndef other():\n    return 2\n",
    "vllm/config/model.py": "class Model:\n    def drain(self):\n        return 3\n",
}
TARGET = "vllm.v1.core.pool:Pool.take"


@pytest.fixture
def tree(tmp_path):
    """Unpacked sources, in which one text is another."""

    def tree(path="", old="", new=""):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name, text in SOURCES.items():
            file = folder / name
            file.parent.mkdir(parents=True, exist_ok=True)
            for package in [file.parent, *file.parent.relative_to(folder).parents]:
                (folder / package / "__init__.py").touch()
            assert name != path or old in text
            file.write_text(text.replace(old, new) if name == path else text)
        return Sources(folder)

    return tree


def test_a_target_and_what_it_calls_are_below_it(tree):
    found = below.below(tree(), [TARGET])
    assert {name: one.steps for name, one in found.items()} == {
        TARGET: 0,
        "vllm.v1.core.helper:first": 1,
        "vllm.utils:rounded": 1,
        # Of an object whose class the source does not say.
        "vllm.v1.core.queue:Queue.drain": 2,
    }


def test_of_a_class_there_are_its_statements_and_what_runs_by_itself(tree):
    found = below.below(tree(), ["vllm.v1.core.pool:Pool"])
    assert set(found) == {
        "vllm.v1.core.pool:Pool",
        "vllm.v1.core.pool:Pool.__init__",
        "vllm.v1.core.pool:LIMIT",
    }


@pytest.mark.parametrize(
    ("path", "old", "new", "changed"),
    [
        ("vllm/v1/core/pool.py", "rounded(count))", "rounded(1))", [TARGET]),
        ("vllm/v1/core/helper.py", "[:count]", "[1:count]", ["vllm.v1.core.helper:first"]),
        ("vllm/v1/core/queue.py", "return self", "return 1", ["vllm.v1.core.queue:Queue.drain"]),
        ("vllm/v1/core/pool.py", "return 1", "return 2", []),  # which nothing calls
        ("vllm/v1/core/pool.py", "Take blocks", "Take some blocks", []),
        ("vllm/utils.py", "return 2", "return 3", []),
        ("vllm/config/model.py", "return 3", "return 4", []),
        (
            "vllm/v1/core/helper.py",
            "def first",
            "def second",
            # A name that is nowhere is no function; the method that it called is gone with it.
            ["vllm.v1.core.helper:first", "vllm.v1.core.queue:Queue.drain"],
        ),
    ],
    ids=["itself", "a callee", "a method", "unused", "a docstring", "beside", "apart", "renamed"],
)
def test_what_changed_is_named(tree, path, old, new, changed):
    before = below.below(tree(), [TARGET])
    after = below.below(tree(path, old, new), [TARGET])
    assert below.changed(before, after) == changed
    assert (below.digest(before) == below.digest(after)) is not bool(changed)


def test_a_function_does_not_depend_on_the_order_in_which_it_is_found(tree):
    other = "vllm.v1.core.helper:first"
    one = below.below(tree(), [TARGET, other])
    assert one == below.below(tree(), [other, TARGET])
    assert one[other].steps == 0


@pytest.fixture
def known(monkeypatch):
    """Three releases next to each other with the same below, unless a test says another."""

    def known(**changes):
        monkeypatch.setattr(patches, "FEATURES", (patches.fence.FEATURE,))
        made = {
            release: sharing.Below(release, 7, "same", sharing.targets_digest(release))
            for release in ("0.30.0", "0.31.0", "0.32.0")
        }
        for release, changed in changes.items():
            name = release.lstrip("v").replace("_", ".")
            made[name] = made[name]._replace(**changed)
        monkeypatch.setattr(sharing, "recorded", lambda: made)
        monkeypatch.setattr(supported, "RELEASES", dict.fromkeys(made, supported.VALIDATED))

    return known


def test_releases_in_a_row_have_the_runs_of_the_newest(known):
    known()
    assert [sharing.runs_of(one) for one in supported.validated()] == ["0.32.0"] * 3
    assert sharing.shared() == [("0.30.0", "0.32.0", 7), ("0.31.0", "0.32.0", 7)]


def test_a_release_in_which_something_moved_has_its_own(known):
    known(v0_32_0={"digest": "another"})
    assert [sharing.runs_of(one) for one in supported.validated()] == ["0.31.0", "0.31.0", "0.32.0"]
    known(v0_31_0={"digest": "another"})
    assert sharing.shared() == []  # 0.30.0 and 0.32.0 are not next to each other


def test_a_release_that_is_not_validated_has_no_runs_to_share(known, monkeypatch):
    known()
    monkeypatch.setitem(supported.RELEASES, "0.32.0", supported.INSPECTED_ONLY)
    assert sharing.shared() == [("0.30.0", "0.31.0", 7)]


def test_what_was_found_below_other_targets_is_not_shared(known):
    """Until scripts/matrix shapes has run again."""
    known(v0_31_0={"targets": "of before"})
    assert sharing.shared() == []


def test_releases_with_other_patches_share_nothing(known, monkeypatch):
    known()
    row, *rest = patches.fence.FEATURE.seams
    assert isinstance(row, Patch)
    ended = Seam((row._replace(before="0.32"), row._replace(id="two", since="0.32")))
    feature = patches.fence.FEATURE._replace(seams=(ended, *rest))
    monkeypatch.setattr(patches, "FEATURES", (feature,))
    assert sharing.shared() == [("0.30.0", "0.31.0", 7)]


def test_the_recorded_are_those_of_todays_targets():
    """Otherwise run scripts/matrix shapes."""
    recorded = sharing.recorded()
    releases = [one for one in supported.RELEASES if Version(one) >= Version(supported.FLOOR)]
    assert sorted(recorded) == sorted(releases)
    for release in releases:
        assert recorded[release].targets == sharing.targets_digest(release), release


def test_a_release_of_equal_sources_shares():
    """0.27.1 differs from 0.27.0 in its version alone."""
    assert sharing.same("0.27.0", "0.27.1")
    assert not sharing.same("0.27.1", "0.28.0")
