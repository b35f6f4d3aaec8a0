"""The exception tree: one root, and fields that survive the way to another process."""

import pickle

import pytest

from headway import errors
from headway.errors import HeadwayError, RequestError, UnservableError


@pytest.mark.parametrize("name", errors.__all__)
def test_one_root(name: str) -> None:
    assert issubclass(getattr(errors, name), HeadwayError)


@pytest.mark.parametrize(
    "error",
    [
        UnservableError("needs 12 blocks of 8", needed_blocks=12, total_blocks=8),
        RequestError("'n' must be 1", param="n", code="unsupported"),
        RequestError("the body is not JSON"),
    ],
)
def test_fields_survive_pickling(error: HeadwayError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error) == error.args[0]
    assert vars(again) == vars(error)
