"""Each error is a SpmdError and also the builtin that a caller would expect."""

import inspect

import pytest

from torchspmd import errors
from torchspmd.errors import SpmdError

_BUILTINS = {
    "LedgerError": ValueError,
    "UsageError": ValueError,
    "WorldError": RuntimeError,
    "RankError": RuntimeError,
    "LayoutError": ValueError,
    "LayoutCountError": AssertionError,
    "UnsupportedModuleError": NotImplementedError,
    "PlanError": ValueError,
    "CheckError": ValueError,
}
_ALL = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value)
    and issubclass(value, Exception)
    and not issubclass(value, Warning)
]
_CHILDREN = [error for error in _ALL if error is not SpmdError]


@pytest.mark.parametrize("error", _CHILDREN, ids=lambda error: error.__name__)
def test_is_a_spmd_error_and_a_builtin(error):
    builtins = [
        base
        for base in error.__mro__
        if base.__module__ == "builtins" and base not in (Exception, BaseException)
    ]
    assert issubclass(error, SpmdError)
    assert len(builtins) > 1  # one of its own, and object


@pytest.mark.parametrize(("name", "builtin"), _BUILTINS.items())
def test_can_be_caught_as_the_builtin(name, builtin):
    with pytest.raises(builtin) as caught:
        raise getattr(errors, name)("text")
    assert str(caught.value) == "text"


@pytest.mark.parametrize("error", _ALL, ids=lambda error: error.__name__)
def test_has_its_own_docstring_and_name(error):
    assert error.__module__ == "torchspmd.errors"
    assert error.__name__.endswith("Error")
    parents = {base.__doc__ for base in error.__mro__[1:]}
    assert error.__doc__ not in (None, *parents)


def test_no_builtin_stands_for_all_of_them():
    assert not issubclass(SpmdError, (ValueError, RuntimeError))


def test_notes_are_added_behind_the_page():
    error = errors.CaptureError("text")
    error.add_note("more")
    assert str(error) == "text"
    assert error.__notes__[1:] == ["more"]
    assert len(errors.CaptureError("text").__notes__) == 1
    assert errors.UsageError("text").__notes__ == []
