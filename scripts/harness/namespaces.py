"""Namespaces and file systems of one process and its children: small, full, read-only, frozen.

Whoever is not root asks for them inside ``unshare --user --map-root-user``.
"""

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.console import HarnessError

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
_LONGEST_HANG = 60  # seconds, should a test itself hang on it
_NEED_ROOT = (
    "file systems of its own need root, or unshare --user --map-root-user --mount before the "
    "command"
)


def _run(*words: str | Path) -> None:
    """Run a command.

    Raises:
        HarnessError: it failed.
    """
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise HarnessError(f"{words[0]} failed ({done.stderr.strip()}); {_NEED_ROOT}")


def own_mounts() -> None:
    """Give this thread, and what it starts from here on, a mount namespace of its own.

    What is mounted in it is gone with its last process.
    """
    # Python has it from 3.12 on, as os.unshare.
    if ctypes.CDLL(None).unshare(_NEW_MOUNTS) != 0:
        raise HarnessError(f"unshare failed; {_NEED_ROOT}")
    _run("mount", "--make-rprivate", "/")


def mount_tmpfs(folder: Path, size: int, inodes: int = 0) -> None:
    """Mount a file system of ``size`` bytes and, if given, so many inodes; see ``own_mounts``."""
    options = f"size={size}" + (f",nr_inodes={inodes}" if inodes else "")
    _run("mount", "-t", "tmpfs", "-o", options, "none", folder)


def bind(folder: Path, place: Path) -> None:
    """Show ``folder`` at another place too."""
    _run("mount", "--bind", folder, place)


def remount(folder: Path, read_only: bool) -> None:
    """Make a mounted file system read-only, or writable again."""
    _run("mount", "-o", f"remount,{'ro' if read_only else 'rw'}", folder)


def unmount(folder: Path) -> None:
    """Unmount; files that are open stay readable."""
    _run("umount", "--lazy", folder)


class Disk:
    """An ext4 file system that hangs on request: whoever changes it waits until it goes on.

    A process of its own lets it go on when this one ends, which would otherwise never be gone.

    Args:
        folder: that it is mounted on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._holder: subprocess.Popen[str] | None = None

    def hang(self) -> None:
        """Let every write, creation and renaming wait in the kernel; reading goes on."""
        hold = f'fsfreeze -f "$0" && echo hangs; read -t {_LONGEST_HANG}; fsfreeze -u "$0"'
        self._holder = subprocess.Popen(
            ["bash", "-c", hold, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "hangs\n"

    def go_on(self) -> None:
        """Let go who waits."""
        if self._holder is not None:
            self._holder.communicate("\n")
            self._holder = None


@contextmanager
def disk(folder: Path, image: Path, size: int = 32 << 20) -> Iterator[Disk]:
    """Yield an ext4 file system of ``size`` bytes in the file ``image``, mounted on ``folder``.

    Raises:
        HarnessError: it could not be made; it needs root and a loop device.
    """
    folder.mkdir(exist_ok=True)
    with image.open("wb") as file:
        file.truncate(size)
    _run("mkfs.ext4", "-q", image)
    _run("mount", "-o", "loop", image, folder)
    made = Disk(folder)
    try:
        yield made
    finally:
        made.go_on()
        unmount(folder)
