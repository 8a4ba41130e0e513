"""``parallelize_module``: check everything, then put the styles on the modules."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.errors import LayoutError, UsageError
from torchspmd.layout.retired import (
    copy_attributes,
    describe_losses,
    refuse_training,
    set_successor,
    successor,
)
from torchspmd.parallel.axis import build_axis
from torchspmd.parallel.plan.assignment import place
from torchspmd.parallel.plan.plan import Style
from torchspmd.parallel.plan.resolve import is_alias, resolve
from torchspmd.parallel.replicas import Replicas, is_meant

M = TypeVar("M", bound=nn.Module)

_CHANGED = "The module was changed: build it anew."


def parallelize_module(
    module: M,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Style | Mapping[str, Style] | None = None,
    *,
    src_data_rank: int | None = 0,
    per_rank: Collection[str] = (),
) -> M:
    """Lay a module over one axis of a mesh, by a style or a plan.

    The whole plan is checked first; on an error of it the module is as it was. What only
    shows when a style of your own has run, such as a tie that it cuts, is an error that
    says that the module was changed. Parameters are replaced by DTensors, so optimizers
    and hooks on gradients are made after this call: to train or to differentiate what
    was replaced is an error.

    Args:
        module: The module; it is changed and returned.
        device_mesh: A mesh with one axis, such as ``mesh["tp"]``; default is the mesh
            of the surrounding ``with mesh:``.
        parallelize_plan: A style for the module itself, or styles by pattern. A pattern
            is a module's path, in which each part may have ``*``, ``?`` and ``[...]``;
            the empty pattern is the module itself.
        src_data_rank: Rank of the axis whose values all ranks get, so that the result
            is that of one device; None keeps each rank's own values.
        per_rank: Patterns of parameters (or modules) that are each rank's own on purpose,
            such as shards that were cut by hand. All others that every rank holds whole
            are compared at the end of backward passes 1, 2, 4, 8, ...: a rank with other
            values or gradients is a ``CheckError`` there.

    Raises:
        PlanError: The plan does not fit; lists every problem.
        LayoutError: The mesh does not have one axis.

    Example:
        >>> from torchspmd.testing import fake_mesh
        >>> from torchspmd.parallel import ColwiseParallel, RowwiseParallel
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        >>> with fake_mesh(4, ("tp",)) as mesh:
        ...     model = parallelize_module(model, mesh, plan)
        >>> model[0].weight.placements
        (Shard(dim=0),)
    """
    axis = build_axis(_find_mesh(device_mesh))
    is_empty = isinstance(parallelize_plan, Mapping) and not parallelize_plan
    if parallelize_plan is None or is_empty:
        what = "an empty" if is_empty else "no"
        raise UsageError(
            f"parallelize_module: {what} parallelize_plan, so nothing would happen. Pass a "
            "style, or a dict from module patterns to styles."
        )
    assignments = resolve(parallelize_plan, module, axis).assignments
    _check_patterns(module, per_rank)
    axis = replace(axis, replicas=Replicas(module, axis.mesh, per_rank))
    slots = _plain_slots(module)
    _torch.share_memory_of_shards()
    for assignment in assignments:
        place(assignment, axis, src_data_rank)
    _retire_replaced(slots)
    return module


def _check_patterns(module: nn.Module, per_rank: Collection[str]) -> None:
    if isinstance(per_rank, str):
        raise UsageError(
            f"parallelize_module: per_rank is the text {per_rank!r}; pass a list of "
            "patterns."
        )
    names = [name for name, _ in module.named_parameters()]
    unused = [
        repr(pattern)
        for pattern in per_rank
        if not any(is_meant(pattern, name) for name in names)
    ]
    if unused:
        raise UsageError(
            f"parallelize_module: per_rank names {', '.join(unused)}, which no parameter "
            f"of {type(module).__name__} matches. Pass names of parameters or modules, in "
            "which * and ? are wildcards."
        )


def _find_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    found = mesh if mesh is not None else _torch.current_mesh()
    if found is None:
        raise LayoutError(
            "parallelize_module: no device_mesh. Pass a mesh with one axis, or call it "
            "inside `with mesh:`."
        )
    return found


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a module held a plain parameter before the styles were applied."""

    path: str
    owner: nn.Module
    kind: str  # the owner's class before a style gave it another
    name: str
    parameter: nn.Parameter

    def now(self) -> nn.Parameter | None:
        """What it holds there now; None where the parameter was split into parts."""
        return dict(self.owner.named_parameters(recurse=False)).get(self.name)

    def is_replaced(self) -> bool:
        """Whether a style has put something else there."""
        return self.now() is not self.parameter


def _plain_slots(module: nn.Module) -> list[_Slot]:
    """Every name of every parameter that is not a DTensor yet."""
    found = []
    for path, parameter in module.named_parameters(remove_duplicate=False):
        if not isinstance(parameter, DTensor):
            prefix, _, name = path.rpartition(".")
            owner = module.get_submodule(prefix)
            found.append(_Slot(path, owner, type(owner).__name__, name, parameter))
    return found


def _retire_replaced(slots: list[_Slot]) -> None:
    """Restore ties that styles have cut, and make use of replaced parameters an error."""
    by_parameter: dict[int, list[_Slot]] = {}
    for slot in slots:
        by_parameter.setdefault(id(slot.parameter), []).append(slot)
    replaced = [
        shared
        for shared in by_parameter.values()
        if any(slot.is_replaced() for slot in shared)
    ]
    # Those of our own styles were checked before; other styles show theirs only now.
    losses = describe_losses({slots[0].path: slots[0].parameter for slots in replaced})
    if losses:
        raise LayoutError(f"parallelize_module: {'; '.join(losses)}. {_CHANGED}")
    for shared in replaced:
        _tie_again(shared)
        _retire(shared[0])


def _tie_again(slots: list[_Slot]) -> None:
    """One object for all names: styles of torch make another for each module."""
    held = [slot.now() for slot in slots]
    known = successor(slots[0].parameter)
    placed = {slot.path.rpartition(".")[0] for slot in slots if slot.is_replaced()}
    first: Any = next(
        (slot.now() for slot in slots if known is None and slot.is_replaced()), known
    )
    held = [
        first if not slot.is_replaced() and is_alias(slot.path, placed) else parameter
        for slot, parameter in zip(slots, held, strict=True)
    ]
    if all(slot.now() is first for slot in slots):
        return
    if all(_same_layout(first, parameter) for parameter in held):
        for slot in slots:
            slot.owner.register_parameter(slot.name, first)
        return
    listed = ", ".join(
        f"'{slot.path}' {_describe(parameter)}"
        for slot, parameter in zip(slots, held, strict=True)
    )
    if known is not None:
        listed += f", a module of an earlier call {_describe(known)[3:]}"
    raise LayoutError(
        f"parallelize_module: one parameter has become several: {listed}. Give the "
        "modules that share it styles with the same layout, or untie them first. "
        f"{_CHANGED}"
    )


def _same_layout(first: Any, other: Any) -> bool:
    return (
        isinstance(first, DTensor)
        and isinstance(other, DTensor)
        and other.device_mesh == first.device_mesh
        and other.placements == first.placements
    )


def _describe(parameter: nn.Parameter | None) -> str:
    if isinstance(parameter, DTensor):
        return f"is laid out as {parameter.placements[0]!r}"
    return "is as it was" if parameter is not None else "was split into parts"


def _retire(slot: _Slot) -> None:
    parameter, placed = slot.parameter, slot.now()
    if isinstance(placed, DTensor):
        copy_attributes(parameter, placed)
        set_successor(parameter, placed)
    name = f"'{slot.path}' ({slot.kind})"
    try:
        refuse_training(parameter, name)
    except TypeError as error:
        if not parameter.requires_grad:
            return  # no optimizer trains it
        raise LayoutError(
            f"parallelize_module: {name} is a {type(parameter).__name__}, whose objects "
            "cannot be marked as replaced, so an optimizer from before would train it in "
            "vain. Make it an nn.Parameter before parallelize_module, or leave its module "
            f"out of the plan. {_CHANGED}"
        ) from error
