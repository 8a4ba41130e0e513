"""Everything about a call that does not depend on values; worked out once and kept."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.layout.names import axis_names, format_mesh
from torchspmd.local.arguments import (
    Argument,
    ArgumentSpec,
    Leaf,
    list_leaves,
    non_tensor_problems,
    resolve_argument,
)
from torchspmd.local.frame import Frame, build_frame, unknown_axes
from torchspmd.local.layout import Problem, Spec, refuse
from torchspmd.local.outputs import Output, resolve_outputs, resolve_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What ``local_map`` was called with; see there."""

    function: Callable[..., Any]
    name: str
    parameters: tuple[str, ...]
    out_placements: Spec
    in_placements: Spec
    in_grad_placements: Spec
    out_grad_placements: Spec
    out_shapes: Spec
    device_mesh: DeviceMesh | None
    axes: tuple[str, ...] | None
    redistribute_inputs: bool
    check: bool | None


@dataclass(frozen=True, slots=True)
class Plan:
    """How the tensors of a call go in.

    Attributes:
        frame: Mesh and axes.
        arguments: One for each tensor on the mesh, in call order.
        memo: What was worked out about the results of such calls.
    """

    frame: Frame
    arguments: tuple[Argument, ...]
    memo: dict[Any, Any] = field(default_factory=dict, compare=False)


class OnMesh(NamedTuple):
    """One tensor on the mesh among the arguments.

    Attributes:
        tensor: The DTensor.
        leaf: Index of its leaf.
        slot: For a module's parameter: its name, and the dict and key that hold it.
    """

    tensor: DTensor
    leaf: int
    slot: tuple[str, dict[str, Any], str] | None = None


def find_on_mesh(leaves: Sequence[Any]) -> list[OnMesh]:
    """Every DTensor among the leaves, and inside the modules among them."""
    found = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, DTensor):
            found.append(OnMesh(leaf, index))
        elif isinstance(leaf, torch.nn.Module):
            found += [
                OnMesh(slot[1][slot[2]], index, slot)
                for slot in _torch.dtensor_slots(leaf)
            ]
    return found


def build_plan(
    options: Options,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tensors: Sequence[OnMesh],
) -> Plan:
    """Resolve what was written for the arguments of a call, or raise once for all."""
    leaves = list_leaves(args, kwargs, options.parameters)
    frame = _resolve_frame(options, leaves, tensors)
    names = options.parameters
    specs = (
        ArgumentSpec("in_placements", options.in_placements, names),
        ArgumentSpec("in_grad_placements", options.in_grad_placements, names),
    )
    (written, bad), (grads, bad_grads) = (spec.look_up(leaves) for spec in specs)
    rule = "Layouts are matched to arguments by position or by parameter name."
    refuse(options.name, frame.mesh, "layouts do not fit", [*bad, *bad_grads], rule)
    problems: list[Problem] = []
    for leaf, entry in zip(leaves, written, strict=True):
        problems += non_tensor_problems(leaf, entry)
    arguments = []
    for found in tensors:
        argument, more = resolve_argument(
            found.tensor,
            _name(leaves[found.leaf], found),
            written[found.leaf],
            grads[found.leaf],
            frame,
            options.redistribute_inputs,
        )
        arguments.append(argument)
        problems += more
    rule = "Each argument must have the layout of its entry in in_placements."
    refuse(options.name, frame.mesh, "layouts do not match", problems, rule)
    return Plan(frame, tuple(arguments))


def _name(leaf: Leaf, found: OnMesh) -> str:
    return leaf.name if found.slot is None else f"{leaf.name}.{found.slot[0]}"


def _resolve_frame(
    options: Options, leaves: Sequence[Leaf], tensors: Sequence[OnMesh]
) -> Frame:
    mesh = options.device_mesh or tensors[0].tensor.device_mesh
    problems = [
        Problem(
            f"{_name(leaves[found.leaf], found)}: is on mesh "
            f"({format_mesh(found.tensor.device_mesh)})",
            "Bring all arguments to one mesh first, or leave device_mesh= out to use "
            "the arguments' own.",
        )
        for found in tensors
        if found.tensor.device_mesh != mesh
    ]
    what = "arguments are on two meshes"
    refuse(options.name, mesh, what, problems, "A region runs on one mesh.")
    problems = [
        Problem(
            f"axes={options.axes!r}: the mesh has no axis {name!r}",
            f"Choose among: {', '.join(axis_names(mesh))}.",
        )
        for name in unknown_axes(mesh, options.axes)
    ]
    refuse(options.name, mesh, "unknown axis", problems, "axes= names mesh axes.")
    return build_frame(mesh, options.axes)


def build_outputs(
    options: Options, frame: Frame, values: Sequence[Any], result: Any
) -> list[Output]:
    """Resolve what was written for the outputs of a call, or raise once for all."""
    specs = (options.out_placements, options.out_grad_placements, options.out_shapes)
    paths = _torch.leaf_paths(result)
    outputs, problems = resolve_outputs(values, paths, specs, frame)
    rule = "Every tensor that comes out needs a layout, and only tensors have one."
    refuse(options.name, frame.mesh, "outputs do not fit", problems, rule)
    return outputs


def build_shape(
    options: Options,
    plan: Plan,
    output: Output,
    here: Sequence[int],
    shapes: Sequence[Sequence[int]],
) -> tuple[int, ...]:
    """The whole shape of an output, from the arguments' whole shapes, or raise."""
    layouts = [argument.layout for argument in plan.arguments]
    arguments = list(zip(shapes, layouts, strict=True))
    whole, problems = resolve_shape(output, here, arguments, plan.frame)
    rule = "Without communication a rank knows only its own part."
    refuse(options.name, plan.frame.mesh, "an output's size", problems, rule)
    return whole
