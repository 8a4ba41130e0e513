"""Collectives that the user's step starts itself, on memory that no graph can follow."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.capture.refusals import calling_line
from torchspmd.step.capture.substitute import Stage


@final
class NoOwnCollectives(_torch.TorchDispatchMode):
    """Refuses ``torch.distributed``'s collectives: a graph would lose what they write."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            raise CaptureError(
                "compile: the step calls torch.distributed itself, which cannot be "
                f"captured ({func})\n\n  * {calling_line()}\n\nGradients are reduced "
                "already, without a call. Reduce or gather what the step returns after "
                "the step, and put barriers around it. Inside of the step use the "
                "functional form, which returns its result: all_reduce(), "
                "all_gather_tensor(), ... of "
                "torch.distributed._functional_collectives."
            )
        return func(*args, **(kwargs or {}))


# ----------------------------------------------------------------------------
# Assignments to a tensor's ``data``: no operator that a graph could hold.

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # it is a property


@final
class NoDataAssignment(TorchFunctionMode):
    """Refuses ``tensor.data = ...``: the graph would keep the values from before.

    It cannot be taken for a copy: what still holds the old memory keeps the old values.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func == _SET_DATA:
            raise CaptureError(
                "compile: the step assigns to the data of a tensor, which is no operator "
                f"and would be lost\n\n  * {calling_line()}\n\nWrite the values into the "
                "tensor: `with torch.no_grad(): p.copy_(...)` instead of `p.data = ...`."
            )
        return func(*args, **(kwargs or {}))


# ----------------------------------------------------------------------------
# Operators that only do something, and that a functional graph would lose.


@functools.cache  # asked at every call of a traced step
def check_effect(operator: Any) -> None:
    """Refuse an operator that neither returns nor writes anything.

    Nothing in the graph would need it, so it would be removed as dead code and never run.
    """
    if _torch.only_has_effects(operator):
        raise CaptureError(
            f"compile: the step calls {operator}, which returns nothing and by its schema "
            "writes into nothing, so that nothing in a graph needs it and it would never "
            "run. Return its argument from the step and call it after the step."
        )


# ----------------------------------------------------------------------------
# Lists of tensors that are written while a step is traced count their writes.
#
# Eager operators on lists (``_foreach_add_``) raise the version of each tensor that they
# write; on tensors without values they do not. What was read from a tensor, or gathered
# from it, is kept for as long as its version stays: it would be taken for the value of now.


@final
class WrittenLists(_torch.TorchDispatchMode):
    """Raises the version of every tensor in a list that an operator writes into."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        check_effect(func)
        result = func(*args, **kwargs)
        for place, name in _written(func):
            value = args[place] if place < len(args) else kwargs.get(name)
            if isinstance(value, (list, tuple)):
                torch.autograd.graph.increment_version(list(_parts(value)))
        return result


@functools.cache
def _written(operator: Any) -> tuple[tuple[int, str], ...]:
    # Kept for each operator: asked at every call of a traced step.
    places = _torch.written_arguments(operator)
    if not places:
        return ()
    return tuple(zip(places, _torch.signature_of(operator).written, strict=True))


def _parts(tensors: Any) -> Iterator[torch.Tensor]:
    """Each tensor, and of a DTensor its shard too, which has a version of its own."""
    for tensor in tensors:
        if tensor is None:  # optional ones
            continue
        yield tensor
        local = _torch.plain_tensor(tensor)
        if local is not tensor:
            yield local


# ----------------------------------------------------------------------------
# Libraries that ask whether a tensor has values are told the truth about DTensors.
#
# transformers looks into an attention mask to leave it out where nothing is masked, unless
# the mask is a fake tensor: then it computes with every mask, which is right for all
# batches of a graph. It does not know a DTensor around a fake tensor for one.

_ASKS = ("transformers.utils.import_utils", "is_fake_tensor")


@contextlib.contextmanager
def known_as_traced() -> Iterator[None]:
    """Inside, transformers takes a DTensor without values for what it is."""
    # Nothing is imported for this: a model of transformers has imported it already.
    module, name = _ASKS
    library = sys.modules.get(module)
    asks: Callable[[Any], bool] | None = getattr(library, name, None)
    if asks is None:
        # Another version: what looks into a tensor is refused, by its line.
        yield
        return

    def looks_inside(value: Any) -> bool:
        return asks(_torch.plain_tensor(value))

    setattr(library, name, looks_inside)
    try:
        yield
    finally:
        setattr(library, name, asks)


# ----------------------------------------------------------------------------
# Parameters whose gradients a step clears before it makes its own.
#
# What such a step finds in ``grad`` decides nothing, so its own gradient may be put there
# later. Where ``grad`` is None to begin with, a graph does not show whether the step would
# have cleared it: the call of ``zero_grad()`` does.


@contextlib.contextmanager
def noting_cleared(stage: Stage) -> Iterator[None]:
    """Note on the stage whose gradients ``zero_grad()`` clears before backward."""
    places = {id(shown): place for place, shown in enumerate(stage.shown)}

    def note(parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            place = places.get(id(parameter))
            if place is not None and place not in stage.arrived:
                stage.fresh.add(place)

    def of_optimizer(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        note(each for group in optimizer.param_groups for each in group["params"])
        optimizer_clears(optimizer, *args, **kwargs)

    def of_module(module: Any, *args: Any, **kwargs: Any) -> None:
        note(module.parameters())
        module_clears(module, *args, **kwargs)

    optimizer_clears, module_clears = Optimizer.zero_grad, nn.Module.zero_grad
    _set(Optimizer, of_optimizer)
    _set(nn.Module, of_module)
    try:
        yield
    finally:
        _set(Optimizer, optimizer_clears)
        _set(nn.Module, module_clears)


def _set(kind: Any, clears: Callable[..., None]) -> None:
    kind.zero_grad = clears


# ----------------------------------------------------------------------------
# Loss scaling in a captured step: an update may be skipped, without a host read.

# Optimizers whose state, made in a step that is skipped, is as good as none when it is
# zero: it decays to what the first real step would make.
_START_AT_ZERO = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.RAdam,
    torch.optim.Adafactor,
)


@contextlib.contextmanager
def scaled_steps(stage: Stage) -> Iterator[None]:
    """While a step is traced, have its scalers choose by value inside the graph."""
    with contextlib.ExitStack() as stack:
        is_updated = [
            stack.enter_context(
                _torch.choosing_steps(scaler, _Choice(stage, stage.inventory).step)
            )
            for _, scaler in stage.inventory.scalers
        ]
        yield
        if not all(each() for each in is_updated):
            raise CaptureError(
                "compile: the step unscales gradients or steps through a GradScaler, but "
                "does not call its update(), so that what it found would be lost. Call "
                "scaler.update() inside the step, after scaler.step()."
            )


class _Choice:
    """Makes an optimizer's step and takes it back where infinities were found."""

    def __init__(self, stage: Stage, inventory: Inventory) -> None:
        self._stage, self._inventory = stage, inventory

    def step(
        self, optimizer: Optimizer, found: torch.Tensor, make: Callable[[], Any]
    ) -> Any:
        """What ``optimizer.step`` would do, or nothing, chosen when the graph runs."""
        self._check(optimizer)
        with torch.no_grad():
            before = [(each, each.clone()) for each in self._tensors(optimizer)]
        known = {id(each) for each, _ in before}
        result = make()
        created = [each for each in self._tensors(optimizer) if id(each) not in known]
        if created:
            _check_start(optimizer)
        with torch.no_grad():
            is_skipped = found != 0
            for tensor, old in before:
                tensor.copy_(torch.where(is_skipped, old, tensor))
            for tensor in created:
                tensor.copy_(torch.where(is_skipped, torch.zeros_like(tensor), tensor))
        return result

    def _tensors(self, optimizer: Optimizer) -> list[torch.Tensor]:
        """The parameters and states that a step writes, this rank's part of each."""
        index = [each for _, each in self._inventory.optimizers].index(optimizer)
        found = [
            self._stage.steps_on(slot)
            for owner, _, slots in self._inventory.groups
            if owner == index
            for slot in slots
        ]
        found += [
            value
            for entries in optimizer.state.values()
            for value in entries.values()
            if isinstance(value, torch.Tensor)
        ]
        return [_torch.plain_tensor(tensor) for tensor in found]

    def _check(self, optimizer: Optimizer) -> None:
        names = [number.name for number in self._inventory.numbers if number.is_state]
        if names:
            raise CaptureError(
                f"compile: {type(optimizer).__name__} counts its steps with a Python "
                f"number ({names[0]}), which cannot depend on whether GradScaler skips "
                "the step. Keep the counter in a tensor, or scale the loss by a constant."
            )


def _check_start(optimizer: Optimizer) -> None:
    dampening = any(group.get("dampening") for group in optimizer.param_groups)
    if type(optimizer) not in _START_AT_ZERO or dampening:
        raise CaptureError(
            f"compile: the first step of {type(optimizer).__name__} makes its state, and "
            "GradScaler may skip that step. Make one step without compile first, so that "
            "the state exists, or pass fused=True where the optimizer has it."
        )
