"""An operator that writes lists of tensors, for updates that no compiler looks into."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

Update = Callable[[int, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]

_UPDATES: dict[str, Update] = {}  # by a name that says what is computed


def update_operator(name: str, update: Update) -> Callable[..., Any]:
    """The operator that calls ``update`` where it is called with this name.

    Its arguments are the name, a number of the caller's, the tensors that it writes and
    those that it reads. Compiled code that torch keeps in a cache has the name in it, so
    that one name must mean one computation in every process.
    """
    _library()
    _UPDATES[name] = update
    operator: Callable[..., Any] = torch.ops.torchspmd.update.default
    return operator


@functools.cache
def _library() -> torch.library.Library:
    """Made when it is needed first: an import registers nothing."""
    library = torch.library.Library("torchspmd", "FRAGMENT")
    library.define(
        "update(str name, int number, Tensor(a!)[] written, Tensor[] read) -> ()"
    )
    library.impl("update", _update, "CompositeExplicitAutograd")
    torch.library.register_fake("torchspmd::update", _nothing, lib=library)
    return library


def _update(
    name: str,
    number: int,
    written: Sequence[torch.Tensor],
    read: Sequence[torch.Tensor],
) -> None:
    _UPDATES[name](number, written, read)


def _nothing(*_: Any) -> None:
    pass
