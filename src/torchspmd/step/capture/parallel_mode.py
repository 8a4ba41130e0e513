"""How a step is spread over ranks, as far as capture has to know: the base of all modes.

A mode decides what the user's code sees for each tensor, who reduces gradients, and which
tensors the step is to work on afterwards.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.errors import CaptureError, UsageError
from torchspmd.layout.retired import free_retired
from torchspmd.step.capture.inventory import Inventory, Role, Slot
from torchspmd.step.graph.metadata import OwnerLog


class ParallelMode:
    """What one mode does to the tensors of a step while it is traced.

    This class itself is the mode of one device, without a mesh: the step as it is
    written, with the layouts that its tensors have.
    """

    mesh: DeviceMesh | None = None
    takes_layouts = True  # whether parameters may be DTensors already
    reduces = False  # whether ranks hold whole parameters, and reduce their gradients
    has_own_batches = False  # whether each rank computes on a batch of its own

    @property
    def sharded_over(self) -> tuple[DeviceMesh, ...]:
        """The axes that this mode itself shards tensors over."""
        return () if self.mesh is None else (self.mesh,)

    def lay_out(self, inventory: Inventory) -> "Relayout | None":
        """Other tensors for those of the step, to be put in place after capture."""
        return None

    def stand_in(self, inventory: Inventory) -> Callable[[int], torch.Tensor]:
        """What gives a tensor like the parameter in a slot, in the layout of its state."""
        return lambda slot: inventory.slots[slot].tensor

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """What must hold while the step is traced."""
        return contextlib.nullcontext()

    def installed(
        self, inventory: Inventory, shown: list[torch.Tensor], log: OwnerLog
    ) -> contextlib.AbstractContextManager[None]:
        """What must hold while the user's objects have traced tensors."""
        return contextlib.nullcontext()

    def show(self, slot: Slot, local: torch.Tensor) -> torch.Tensor:
        """What the user's code sees for a traced tensor: its layout, around the tensor."""
        layout = _torch.layout_of(slot.tensor)
        return local if layout is None else _torch.wrap_local(local, layout)

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient that backward has just made, reduced over the ranks."""
        return gradient

    def for_optimizer(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A gradient in the parameter's layout, for an optimizer on plain tensors."""
        gradient = parameter.grad
        if gradient is None:
            return None
        wanted, found = _torch.layout_of(parameter), _torch.layout_of(gradient)
        if (wanted is None) != (found is None):
            raise CaptureError(
                "compile: the step sets the grad of a DTensor parameter to a plain tensor, "
                "or of a plain one to a DTensor. Keep the gradient that backward made, or "
                "give it the parameter's layout with distribute_tensor()."
            )
        if wanted is not None and found.placements != wanted.placements:
            moved: Any = gradient
            gradient = moved.redistribute(placements=wanted.placements)
        return _torch.finished(_torch.plain_tensor(gradient))

    def result(self, value: torch.Tensor) -> torch.Tensor:
        """What the caller gets for a returned value: this rank's own, or its shard."""
        return _torch.plain_tensor(value)

    def role_of_stored(self, value: torch.Tensor) -> str:
        """What a value that the step stores in an attribute is to the next call."""
        return Role.INPUT

    def check(self, traced: fx.GraphModule) -> None:
        """Refuse a traced step that this mode would get wrong."""
        return

    def finish(self, graph: fx.GraphModule) -> int:
        """Change the functional graph of the step; how many reductions were joined."""
        return 0


def check_layouts(mode: ParallelMode, slots: list[Slot]) -> None:
    """The default mode lays tensors out itself; a model that has layouts needs a choice."""
    if mode.takes_layouts:
        return
    laid_out = [
        slot.name
        for slot in slots
        if slot.role is not Role.INPUT and _torch.layout_of(slot.tensor) is not None
    ]
    if laid_out:
        raise CaptureError(
            f"compile: {laid_out[0]} and {len(laid_out) - 1} more tensors are DTensors "
            "already, and the default mode would lay plain ones out over "
            f"{mode.mesh}. Pass parallel_mode=DataParallel('replicate', "
            "reduce='avg' or 'sum') with mesh=mesh['dp'], the axis that gradients are "
            "reduced over."
        )


# ----------------------------------------------------------------------------
# Shards that take the place of plain tensors once all ranks have captured the step.


@dataclass(frozen=True, slots=True)
class Checksum:
    """Name, shape and checksum of a tensor that was sharded, and its layout before."""

    text: str
    layout: Any

    def holds_along(self, axis: DeviceMesh) -> bool:
        """Whether the ranks of another axis must hold the same values."""
        if self.layout is None:
            return True
        is_same = bool(self.layout.mesh == axis)
        return is_same and bool(self.layout.placements[0].is_replicate())


@dataclass(frozen=True, slots=True)
class Relayout:
    """Shards that wait to take the place of plain tensors.

    Attributes:
        inventory: What the step will work on: the same slots, with shards in them.
        facts: One for each new shard; equal along the data axis if ranks held one model.
        beside: The other axes that parameters are laid out over.
    """

    inventory: Inventory
    facts: tuple[Checksum, ...]
    beside: tuple[DeviceMesh, ...]
    _before: Inventory

    def facts_along(self, axis: DeviceMesh) -> tuple[str, ...]:
        """Those that are equal along another axis too."""
        return tuple(fact.text for fact in self.facts if fact.holds_along(axis))

    def commit(self) -> None:
        """Put the shards into modules, parameter groups, optimizer state and gradients."""
        before, after = self._before, self.inventory.slots
        for place in before.places:
            place.table[place.key] = after[place.slot].tensor
        _torch.renew_flat_weights(module for _, module in before.modules)
        for index, number, slots in before.groups:
            group = before.optimizers[index][1].param_groups[number]
            group["params"][:] = [after[slot].tensor for slot in slots]
        for index in range(len(before.optimizers)):
            self._commit_state(index)
        for parameter, gradient in before.gradients.items():
            after[parameter].tensor.grad = after[gradient].tensor
        replaced = [
            (old.tensor, new)
            for old, new in zip(before.slots, after, strict=True)
            if old is not new and old.role is Role.PARAMETER
        ]
        before.slots[:] = after
        before.by_id.clear()
        before.by_id.update({id(s.tensor): n for n, s in enumerate(before.slots)})
        for old, slot in replaced:
            free_retired(old, slot.name)
        for name, module in before.modules:
            module.register_forward_pre_hook(_EagerCall(name), with_kwargs=True)
            module.register_load_state_dict_pre_hook(_refuse_whole_values)

    def _commit_state(self, index: int) -> None:
        state, slots = self._before.saved_states[index], self.inventory.slots
        for place in self._before.states:
            if place.optimizer == index:
                owner = self._before.slots[place.parameter].tensor
                state[owner][place.key] = slots[place.slot].tensor
        entries = list(state.items())
        state.clear()  # the same mapping, with its order, under the new parameters
        for parameter, entry in entries:
            slot = self._before.by_id.get(id(parameter))
            state[parameter if slot is None else slots[slot].tensor] = entry


def _refuse_whole_values(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    """Refuse plain tensors in the place of shards, which torch could not copy."""
    parameters = dict(
        module.named_parameters(prefix=prefix.rstrip("."), remove_duplicate=False)
    )
    whole = [
        name
        for name, value in state_dict.items()
        if isinstance(value, torch.Tensor)
        and _torch.layout_of(value) is None
        and name in parameters
        and _torch.layout_of(parameters[name]) is not None
    ]
    if whole:
        raise UsageError(
            f"load_state_dict: {whole[0]} and {len(whole) - 1} more are whole tensors, and "
            "the model's parameters are shards since the first step of "
            "DataParallel('fully_shard'). Load them on every rank with "
            "set_model_state_dict(model, state_dict, options=StateDictOptions("
            "full_state_dict=True)) of torch.distributed.checkpoint.state_dict, or before "
            "the first step."
        )


class _EagerCall:
    """Refuses a call of a sharded model on plain tensors, outside of a compiled step."""

    belongs_to_compiled_step = True
    own = None

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        given = [*_torch.leaves_of(torch.Tensor, (args, kwargs))]
        if not given or any(_torch.layout_of(each) is not None for each in given):
            return
        if any(
            _torch.is_fake(each) and not _torch.is_rehearsed(each) for each in given
        ):  # a step is captured
            return
        if any(_torch.layout_of(each) is not None for each in module.parameters()):
            raise UsageError(
                f"{self._name}: its parameters are shards since the first step of "
                "DataParallel('fully_shard'), and an eager call on plain tensors mixes "
                "both. Call it inside of `with step.full_parameters(model):`, with the "
                "compiled step, on every rank; or compile the evaluation with the same "
                "mode, with torch.no_grad() inside of the function."
            )
