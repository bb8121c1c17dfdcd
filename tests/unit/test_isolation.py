"""Tests see nothing of the user who runs them."""

import os
import pwd
import sys
from pathlib import Path

import pytest

from kvpatch import claims, control, verdicts
from kvpatch.control import protocol
from kvpatch.telemetry import reader

USER = Path(os.environ.get("OF_THE_USER") or pwd.getpwuid(os.getuid()).pw_dir)
WHERE = "from kvpatch import verdicts; print(*verdicts.folders())"
ASKED = ("no_verdict", "no_status_page", "no_claim")


@pytest.mark.parametrize("data", [True, False], ids=["data", "home"])
def test_no_verdict_is_seen(run, monkeypatch, data):
    if not data:
        monkeypatch.delenv("XDG_DATA_HOME")
    folders = [str(folder) for folder in verdicts.folders()]
    assert run(sys.executable, "-c", WHERE).out.split() == folders
    assert len(folders) == 1
    assert not Path(folders[0]).is_relative_to(USER)


def test_no_status_page_is_seen(run):
    assert reader.all_of(False) == []
    assert not Path(os.environ["KVPATCH_STATUS_DIR"]).is_relative_to(USER)


def test_no_claim_and_no_socket_is_seen():
    assert Path("/dev/shm") not in (claims.BASE, claims.folder().parent, protocol.folder().parent)
    assert not claims.held("tier", "chat")
    assert control.engines() == []


def test_a_user_with_all_of_that_sees_the_same(run, tmp_path):
    user = tmp_path / "user"
    (user / ".local/share/kvpatch/verdicts").mkdir(parents=True)
    settings = dict.fromkeys(
        ("HOME", "OF_THE_USER", "KVPATCH_VERDICTS", "KVPATCH_STATUS_DIR"), user
    )
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        settings[name] = user / ".local/share"
    safe = ("-P",) if sys.version_info >= (3, 11) else ()
    command = (*safe, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__)
    done = run(
        sys.executable, *command, "-k", " or ".join(ASKED), KVPATCH_HOST_POOL="1GiB", **settings
    )
    assert done.code == 0, done.out + done.err
    assert "4 passed" in done.out
