"""``parallelize_module``: check everything, then put the styles on the modules."""

from collections.abc import Mapping
from typing import TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchspmd import _torch
from torchspmd.errors import LayoutError, UsageError
from torchspmd.parallel.axis import Axis, build_axis
from torchspmd.parallel.plan.assignment import Assignment
from torchspmd.parallel.plan.plan import Style
from torchspmd.parallel.plan.resolve import resolve
from torchspmd.parallel.replaced import plain_spots, retire_replaced
from torchspmd.parallel.style import ParallelStyle, Place

M = TypeVar("M", bound=nn.Module)


def parallelize_module(
    module: M,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Style | Mapping[str, Style] | None = None,
    *,
    src_data_rank: int | None = 0,
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
    if parallelize_plan is None:
        raise UsageError(
            "parallelize_module: no parallelize_plan, so nothing would happen. Pass a "
            "style, or a dict from module patterns to styles."
        )
    assignments = resolve(parallelize_plan, module, axis).assignments
    spots = plain_spots(module)
    for assignment in assignments:
        _place(assignment, axis, src_data_rank)
    retire_replaced(spots)
    return module


def _place(assignment: Assignment, axis: Axis, src_data_rank: int | None) -> None:
    style, module = assignment.style, assignment.module
    if isinstance(style, ParallelStyle):
        place = Place(axis=axis, path=assignment.path, src_data_rank=src_data_rank)
        placed = style.place(module, place)
    else:
        placed = _torch.apply_torch_style(style, module, axis.mesh, src_data_rank)
    if placed is not module:
        raise LayoutError(
            f"'{assignment.path}': {type(style).__name__} returned another module. A "
            "style changes the module that it is given and returns it."
        )


def _find_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    found = mesh if mesh is not None else _torch.current_mesh()
    if found is None:
        raise LayoutError(
            "parallelize_module: no device_mesh. Pass a mesh with one axis, or call it "
            "inside `with mesh:`."
        )
    return found
