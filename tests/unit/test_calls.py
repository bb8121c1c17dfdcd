"""What wrappers were called with."""

import pytest

from kvpatch.calls import argument


@pytest.mark.parametrize(
    ("args", "kwargs"), [(("a", "b"), {}), (("a",), {"second": "b"}), ((), {"second": "b"})]
)
def test_an_argument_is_found_by_name_or_position(args, kwargs):
    assert argument(args, kwargs, 1, "second") == "b"


def test_an_argument_that_is_none_was_given():
    assert argument((), {"second": None}, 1, "second") is None


def test_an_argument_that_was_not_given_is_an_error():
    with pytest.raises(IndexError):
        argument(("a",), {}, 1, "second")
