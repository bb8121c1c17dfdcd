"""The size of the host device, as the operator writes it."""

import pytest

from kvpatch.environ import HOST_DEVICE
from kvpatch.hostdevice import ledger

MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2048 * MIB),
        ("512MiB", 512 * MIB),
        ("0.5GiB", 512 * MIB),
        ("1.5GiB", 1536 * MIB),
        ("3MiB", 2 * MIB),  # whole pages of 2 MiB
        ("513MiB", 512 * MIB),
        ("4194304", 4 * MIB),
        (" 2GiB ", 2048 * MIB),
    ],
)
def test_sizes(monkeypatch, text, size):
    monkeypatch.setenv(HOST_DEVICE.name, text)
    assert ledger.device_size() == size


@pytest.mark.parametrize("text", ["", "lots", "0", "2", "1MiB", "2 GiBs", "2GX", "-1GiB", "2PiB"])
def test_what_is_no_size(monkeypatch, text):
    monkeypatch.setenv(HOST_DEVICE.name, text)
    with pytest.raises(ValueError, match="is not a size; use for example 2GiB or 512MiB"):
        ledger.device_size()


def test_the_size_is_that_of_the_command_that_is_asked_about(monkeypatch):
    monkeypatch.delenv(HOST_DEVICE.name, raising=False)
    assert ledger.require_size({HOST_DEVICE.name: "2GiB"}) == 2 << 30
