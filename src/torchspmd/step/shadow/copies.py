"""Copies of the tensors of a call, in the places of the user's own while a block runs.

The user's tensors are not written, so that nothing has to be copied back: only tables,
lists and the ``state`` of optimizers hold something else for a while, as in a capture.
"""

import contextlib
import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.layout.retired import copy_attributes
from torchspmd.step.capture.inventory import Inventory, Role, Slot
from torchspmd.step.capture.spread import Spread
from torchspmd.step.modes.fully_shard import FullySharded
from torchspmd.step.modes.gather import gather_rows
from torchspmd.step.modes.global_batch import GlobalBatch
from torchspmd.step.modes.shard_layout import read_sharding

# ----------------------------------------------------------------------------
# What the eager step works on: in each mode, the tensors that its meaning is written for.


@dataclass(frozen=True, slots=True, repr=False)
class Whole:
    """A tensor as the eager step sees it, and how to get this rank's part of it.

    Attributes:
        tensor: The copy.
        part: From a value of its form to this rank's part, as the compiled step has it.
    """

    tensor: torch.Tensor
    part: Callable[[torch.Tensor], torch.Tensor]


def copy_slots(
    inventory: Inventory, spread: Spread, ahead: Mapping[int, torch.Tensor]
) -> list[Whole]:
    """A copy of every tensor of a call; what shares memory shares it in the copies too.

    Args:
        inventory: What the call works on.
        spread: The mode; it says which tensors are whole for the eager step.
        ahead: Values, by slot, that are newer than those of the user's own tensors,
            which have a pending update.
    """
    bases = _shared_bases(inventory)
    return [
        _copied(slot, spread, bases, ahead.get(place))
        for place, slot in enumerate(inventory.slots)
    ]


def _copied(
    slot: Slot,
    spread: Spread,
    bases: dict[int, "_Base"],
    newer: torch.Tensor | None,
) -> Whole:
    tensor = slot.tensor
    layout = _torch.layout_of(tensor)
    local = _torch.plain_tensor(tensor) if newer is None else newer
    part: Callable[[torch.Tensor], torch.Tensor] = _torch.plain_tensor
    if isinstance(spread, FullySharded) and layout is not None:
        sharding = read_sharding(layout, spread.axes)
        assert sharding is not None, layout
        made = gather_rows(local.detach(), sharding)
        if sharding.whole is not None:
            made = _torch.wrap_local(made, sharding.whole)
        if sharding.is_sharded:
            rows = slice(*sharding.kept)

            def part(value: torch.Tensor) -> torch.Tensor:
                return _torch.plain_tensor(value)[rows]

    elif isinstance(spread, GlobalBatch) and slot.role is Role.INPUT and tensor.ndim:
        made, part = _global_rows(tensor, spread)
    elif newer is None and (base := bases.get(_torch.storage_key(tensor))) is not None:
        made = base.view_of(tensor)
    else:
        made = local.detach().clone()
        if layout is not None:
            made = _torch.wrap_local(made, layout)
    return Whole(_like(tensor, made), part)


def _global_rows(
    tensor: torch.Tensor, spread: GlobalBatch
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """The rows of all ranks, and how to get back to those of this rank."""
    mesh: DeviceMesh = spread.mesh
    laid_out: Any = tensor
    if (layout := _torch.layout_of(tensor)) is not None:
        whole = _torch.finished(laid_out.full_tensor()).clone()
        if not any(place.is_shard(0) for place in layout.placements):
            return whole, _torch.plain_tensor
        rows = _torch.plain_tensor(tensor).shape[0]
    else:
        local = tensor.detach().contiguous()
        is_bool = local.dtype is torch.bool  # gloo gathers no booleans
        sent = local.view(torch.uint8) if is_bool else local
        started = _torch.start_all_gather(
            sent, mesh.size(), mesh.get_group().group_name
        )
        whole = _torch.wait(started).clone()
        whole = whole.view(torch.bool) if is_bool else whole
        rows = tensor.shape[0]
    first = mesh.get_local_rank() * rows

    def part(value: torch.Tensor) -> torch.Tensor:
        return value[first : first + rows]

    return whole, part


@dataclass(slots=True, repr=False)
class _Base:
    """One copy of memory that several tensors of a call look at."""

    first: int
    end: int
    memory: torch.Tensor | None = None

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the tensor is in its own memory, in the copy."""
        if self.memory is None:
            size = self.end - self.first
            flat = tensor.detach().as_strided((size,), (1,), self.first)
            self.memory = flat.clone()
        place = tensor.storage_offset() - self.first
        return self.memory.as_strided(tensor.shape, tensor.stride(), place)


def _shared_bases(inventory: Inventory) -> dict[int, _Base]:
    """The memory that more than one plain tensor of a call lies in."""
    found: dict[int, list[torch.Tensor]] = defaultdict(list)
    for slot in inventory.slots:
        tensor = slot.tensor
        if _torch.layout_of(tensor) is None and tensor.numel():
            found[_torch.storage_key(tensor)].append(tensor)
    return {
        key: _Base(min(map(_first, tensors)), max(map(_end, tensors)))
        for key, tensors in found.items()
        if len(tensors) > 1 and len({each.dtype for each in tensors}) == 1
    }


def _first(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _end(tensor: torch.Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()) + 1 + sum((n - 1) * step for n, step in sizes)


def _like(original: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """A copy that is a parameter where the original is one, with what users set on it."""
    if not isinstance(original, nn.Parameter):
        return made.requires_grad_(original.requires_grad)
    parameter = nn.Parameter(made, requires_grad=original.requires_grad)
    kind = type(original)
    if type(parameter) is nn.Parameter and _torch.layout_of(original) is None:
        if kind is not nn.Parameter:
            parameter.__class__ = kind
    copy_attributes(original, parameter)
    return parameter


# ----------------------------------------------------------------------------
# The copies in the user's objects.


@dataclass(slots=True, repr=False)
class Copies:
    """The copies of one call, and what became of them.

    Attributes:
        inventory: The call.
        wholes: A copy for each slot.
        numbers: Newer values of counters that are Python numbers, by their place.
        states: After the block, what each optimizer keeps for each parameter's slot.
        replaced: After the block, the tensors that modules hold in the place of copies.
    """

    inventory: Inventory
    wholes: list[Whole]
    numbers: Mapping[int, Any] = field(default_factory=dict)
    states: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    replaced: dict[int, torch.Tensor] = field(default_factory=dict)

    def arguments(self) -> tuple[Any, Any]:
        """The call's arguments with copies of their tensors."""
        leaves = list(self.inventory.leaves)
        for place, slot in self.inventory.inputs.items():
            leaves[place] = self.wholes[slot].tensor
        args, kwargs = _torch.unflatten_tree(leaves, self.inventory.structure)
        return args, kwargs

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, the user's modules, optimizers and scalers hold the copies."""
        inventory, tensors = self.inventory, [each.tensor for each in self.wholes]
        modules = [module for _, module in inventory.modules]
        for parameter, gradient in inventory.gradients.items():
            tensors[parameter].grad = tensors[gradient].detach()
        with contextlib.ExitStack() as stack:
            for _, scaler in inventory.scalers:
                stack.callback(_restore, vars(scaler), dict(vars(scaler)))
                key = "_per_optimizer_states"
                if key in vars(scaler):
                    vars(scaler)[key] = copy.deepcopy(vars(scaler)[key])
            for place in inventory.places:
                stack.callback(
                    place.table.__setitem__, place.key, place.table[place.key]
                )
                place.table[place.key] = tensors[place.slot]
            for index, number, slots in inventory.groups:
                params = inventory.optimizers[index][1].param_groups[number]["params"]
                stack.callback(params.__setitem__, slice(None), list(params))
                params[:] = [tensors[slot] for slot in slots]
            for index, (_, optimizer) in enumerate(inventory.optimizers):
                stack.callback(setattr, optimizer, "state", optimizer.state)
                optimizer.state = self._copied_state(index)
            stack.enter_context(_torch.keep_flat_weights(modules))
            _torch.renew_flat_weights(modules)
            yield
            self._read()

    def _copied_state(self, index: int) -> Any:
        inventory = self.inventory
        _, optimizer = inventory.optimizers[index]
        by_place = {
            (place.parameter, place.key): self.wholes[place.slot].tensor
            for place in inventory.states
            if place.optimizer == index
        }
        newer = {
            (id(number.holder), number.key): self.numbers[place]
            for place, number in enumerate(inventory.numbers)
            if place in self.numbers
        }
        state: Any = defaultdict(dict)
        for parameter, entries in optimizer.state.items():
            slot = inventory.by_id.get(id(parameter))
            if slot is None:
                continue
            state[self.wholes[slot].tensor] = {
                key: by_place.get((slot, key), newer.get((id(entries), key), value))
                for key, value in entries.items()
            }
        return state

    def _read(self) -> None:
        """What the block left, before everything is put back."""
        inventory = self.inventory
        slots = {id(each.tensor): place for place, each in enumerate(self.wholes)}
        for place in inventory.places:
            now = place.table.get(place.key)
            if now is not self.wholes[place.slot].tensor and now is not None:
                self.replaced[place.slot] = now
        for _, optimizer in inventory.optimizers:
            self.states.append(
                {
                    slots[id(parameter)]: dict(entries)
                    for parameter, entries in optimizer.state.items()
                    if id(parameter) in slots
                }
            )


def _restore(table: dict[str, Any], before: dict[str, Any]) -> None:
    table.clear()
    table.update(before)
