"""Folders that are made once, for all who want them."""

import threading
from concurrent.futures import ThreadPoolExecutor

from harness import venvs


def test_a_folder_that_is_being_made_is_waited_for(tmp_path):
    """The second one would clear it under the first, which then fails."""
    folder, made, begun = tmp_path / "folder", [], threading.Event()
    asked = threading.Event()

    def make():
        made.append(folder)
        folder.mkdir()
        begun.set()
        asked.wait()

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(venvs.made, folder, "recipe", make)
        begun.wait()
        second = pool.submit(venvs.made, folder, "recipe", make)
        assert not second.done()
        asked.set()
        assert first.result() == second.result() == folder
    assert made == [folder]


def test_another_recipe_makes_it_anew(tmp_path):
    folder = tmp_path / "folder"

    def make():
        folder.mkdir()

    venvs.made(folder, "recipe", make)
    (folder / "left").touch()
    venvs.made(folder, "recipe", make)
    assert (folder / "left").exists()
    venvs.made(folder, "another", make)
    assert not (folder / "left").exists()
