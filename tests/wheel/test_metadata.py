"""What an index shows of the wheel."""

import re
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\]\(([^)]+)\)")


@pytest.fixture(scope="module")
def metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return message_from_string(archive.read(name).decode())


@pytest.fixture(scope="module")
def urls(metadata):
    return dict(one.split(", ") for one in metadata.get_all("Project-URL"))


def test_the_published_readme_is_that_of_the_repository_with_absolute_links(metadata, urls):
    published = metadata.get_payload()
    own = (ROOT / "README.md").read_text()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert LINK.sub("", published).strip() == LINK.sub("", own).strip()
    for given, made in zip(LINK.findall(own), LINK.findall(published), strict=True):
        if given.startswith(("https:", "#")):
            assert made == given
        else:
            base, kind, path = re.fullmatch(r"(.*)/(blob|raw)/main/(.*)", made).groups()
            assert (base, path) == (urls["Repository"], given)
            assert kind == ("raw" if given.endswith(".svg") else "blob")
            assert (ROOT / given.partition("#")[0]).exists(), given


def test_every_address_is_of_one_repository(urls):
    assert urls.keys() == {"Repository", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(urls["Repository"]) for url in urls.values())


def test_the_pythons_are_those_that_are_tested(metadata):
    from harness import pythons

    found = {
        one.rpartition(" ")[2]
        for one in metadata.get_all("Classifier")
        if re.search(r":: 3\.\d+$", one)
    }
    assert found == set(pythons.PYTHONS)
    assert metadata["Requires-Python"] == f">={min(pythons.PYTHONS, key=len)}"


def test_completion_is_an_extra(metadata):
    extras = [one for one in metadata.get_all("Requires-Dist") if "extra ==" in one]
    assert extras == ["shtab>=1.9; extra == 'completion'"]
