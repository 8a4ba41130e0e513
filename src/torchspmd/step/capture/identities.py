"""Parameters that Python code knows by themselves: what it set on them, who holds them.

While a step is traced, its parameters are other tensors. A list, a set, a dict or a
variable that holds a parameter, or its ``id``, holds that of the traced one meanwhile, so
that ``p is self.head`` and ``id(p) in frozen`` say what they say in eager code.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from operator import is_
from typing import Any

import torch

from torchspmd.errors import CaptureError
from torchspmd.layout.retired import predecessor_id
from torchspmd.step.capture.guards import walk_data
from torchspmd.step.capture.held import HeldItems
from torchspmd.step.capture.inventory import Inventory, Role

_KINDS = (Role.PARAMETER, Role.BUFFER)


def pass_for(traced: torch.Tensor, own: torch.Tensor) -> None:
    """Give a traced tensor what Python code can ask a parameter about itself."""
    known = vars(traced)
    known.update({key: each for key, each in vars(own).items() if key not in known})
    if isinstance(own, torch.nn.Parameter):
        known["_is_param"] = True  # what isinstance(p, nn.Parameter) asks for


@contextlib.contextmanager
def held_by_python(
    inventory: Inventory, shown: Sequence[torch.Tensor]
) -> Iterator[None]:
    """Inside, whatever the step's code reaches holds traced parameters for its own."""
    pairs = [
        (slot.tensor, traced)
        for slot, traced in zip(inventory.slots, shown, strict=True)
        if slot.role in _KINDS
    ]
    known = {id(own): traced for own, traced in pairs}
    known |= {was: traced for own, traced in pairs if (was := predecessor_id(own))}
    with contextlib.ExitStack() as stack:
        for held in walk_data(inventory).held.values():
            for key, before in held.places():
                now = _all(before, known) if key is None else _one(before, known)
                if now is before:
                    continue
                if isinstance(held, HeldItems) and held.is_frozen:
                    raise _refuse_frozen(held.name)
                stack.callback(held.put, key, before)
                held.put(key, now)
        yield


def _all(held: Any, known: Mapping[int, torch.Tensor]) -> Any:
    """The items of a container with traced parameters; the same object if there is none."""
    if not isinstance(held, dict):
        return _same_or(held, [_one(item, known) for item in held])
    keys = _same_or(list(held), [_one(key, known) for key in held])
    values = [*held.values()]
    changed = _same_or(values, [_one(item, known) for item in values])
    is_same = changed is values and all(map(is_, keys, held))
    return held if is_same else dict(zip(keys, changed, strict=True))


def _one(value: Any, known: Mapping[int, torch.Tensor]) -> Any:
    """A traced parameter, or its id, for one that is held; other values as they are."""
    if type(value) is tuple:  # a list in a list is looked at by itself
        return _same_or(value, tuple(_one(item, known) for item in value))
    if type(value) is int:
        return id(known[value]) if value in known else value
    return known.get(id(value), value) if isinstance(value, torch.Tensor) else value


def _same_or(before: Any, now: Any) -> Any:
    return before if all(map(is_, before, now)) else now


def _refuse_frozen(name: str) -> CaptureError:
    return CaptureError(
        f"compile: {name} is a frozenset of parameters or of their ids, which cannot hold "
        "the tensors that stand for them while the step is captured. Make it a set."
    )
