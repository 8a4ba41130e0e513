"""What comes out of a region: layouts, whole shapes, and what does not fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.comm import format_count
from torchspmd.layout.placements import Layout, format_layout, positive_dims
from torchspmd.local.arguments import CROSSED, CallPlan, Options
from torchspmd.local.frame import (
    Frame,
    Source,
    UnknownSizeError,
    list_sources,
    shape_here,
    whole_shape,
)
from torchspmd.local.specs import (
    Path,
    Problem,
    Spec,
    SpecMismatchError,
    find_entry,
    format_path,
    is_layout,
    layout_problem,
    leftover_entries,
    refuse,
)


@dataclass(frozen=True, slots=True)
class Output:
    """One leaf of what the function returned.

    Attributes:
        name: For messages: ``output``, ``output[1]``.
        layout: On the axes that the region is local over; None for a non-tensor.
        grad: Layout of the gradient that enters, where the user wrote it.
        shape: The whole shape, where the user wrote it.
    """

    name: str
    layout: Layout | None
    grad: Layout | None = None
    shape: tuple[int, ...] | None = None


def is_shape(spec: Spec) -> bool:
    """Whether a spec is one shape: a list or tuple of sizes."""
    return isinstance(spec, (list, tuple)) and all(isinstance(n, int) for n in spec)


def resolve_outputs(
    values: Sequence[Any],
    paths: Sequence[Path],
    specs: tuple[Spec, Spec, Spec],
    frame: Frame,
) -> tuple[list[Output], list[Problem]]:
    """Layouts of all leaves of a result, and what is wrong with what was written.

    Args:
        values: The leaves.
        paths: Their places.
        specs: ``out_placements``, ``out_grad_placements`` and ``out_shapes``.
        frame: Mesh and axes of the region.
    """
    layouts, problems = _look_up(specs[0], paths, "out_placements", is_layout)
    grads, bad_grads = _look_up(specs[1], paths, "out_grad_placements", is_layout)
    shapes, bad_shapes = _look_up(specs[2], paths, "out_shapes", is_shape)
    problems += bad_grads + bad_shapes
    outputs = []
    for value, path, layout, grad, shape in zip(
        values, paths, layouts, grads, shapes, strict=True
    ):
        name = f"output{format_path(path)}"
        entry, depth = layout
        is_exact = depth == len(path)
        problems += [] if problems else _problems(value, name, entry, is_exact, frame)
        is_tensor = isinstance(value, torch.Tensor) and not problems
        outputs.append(
            Output(
                name,
                positive_dims(tuple(entry), value.ndim) if is_tensor else None,
                positive_dims(tuple(grad[0]), value.ndim)
                if is_tensor and grad[0]
                else None,
                tuple(shape[0]) if shape[0] is not None else None,
            )
        )
    return outputs, problems or _gradient_problems(outputs, frame)


def _look_up(
    spec: Spec, paths: Sequence[Path], option: str, is_end: Callable[[Spec], bool]
) -> tuple[list[tuple[Spec, int]], list[Problem]]:
    """The entry for each leaf; a spec may also list the leaves of a nested result."""
    try:
        found = [find_entry(spec, path, option, is_end) for path in paths]
        leftover = (
            leftover_entries(spec, list(paths), option) if not is_end(spec) else []
        )
    except SpecMismatchError as error:
        found, leftover = [], [str(error)]
    if not leftover:
        return found, []
    is_flat = isinstance(spec, (list, tuple)) and len(spec) == len(paths)
    if is_flat and all(entry is None or is_end(entry) for entry in spec):
        return [(entry, len(path)) for entry, path in zip(spec, paths, strict=True)], []
    change = (
        f"{option} has one entry for each output, nested like the outputs or one for all "
        "of them; None is for what is not a tensor."
    )
    return [(None, 0)] * len(paths), [Problem(text, change) for text in leftover]


def _problems(
    value: Any, name: str, spec: Spec, is_exact: bool, frame: Frame
) -> list[Problem]:
    if not isinstance(value, torch.Tensor):
        if spec is None or not is_exact:
            return []
        text = f"{name}: is of type {type(value).__name__}; out_placements asks " + (
            format_layout(spec)
        )
        return [Problem(text, f"Write None for {name}: only tensors have a layout.")]
    if spec is None:
        text = (
            f"{name}: is a tensor of shape {list(value.shape)}; out_placements has None"
        )
        change = (
            f"Write its layout in out_placements, or return {name} as a plain number: "
            "a tensor without a layout would be taken for replicated unseen."
        )
        return [Problem(text, change)]
    bad = layout_problem(tuple(spec), len(frame.axes), value.ndim)
    if bad:
        change = (
            f"Write one placement for each axis of the mesh for {name}. A tensor without "
            "the dim that Shard names, such as a sum, is Partial() where each rank has a "
            "term of it, and Replicate() where all ranks have the same."
        )
        return [Problem(f"{name}: out_placements = {bad}", change)]
    return _mesh_problems(value, name, positive_dims(tuple(spec), value.ndim), frame)


def _mesh_problems(
    value: torch.Tensor, name: str, layout: Layout, frame: Frame
) -> list[Problem]:
    is_dtensor = isinstance(value, DTensor)
    if frame.rest is None:
        if not is_dtensor:
            return []
        change = f"Return its local part: {name}.to_local()."
        return [Problem(f"{name}: is a DTensor, not this rank's tensor", change)]
    if isinstance(value, DTensor) and value.device_mesh == frame.rest:
        bad = frame.crossed_dim(frame.merge(layout, value.placements))
        return [Problem(f"{name}: {bad}", CROSSED)] if bad else []
    names = ", ".join(repr(name) for name in frame.rest.mesh_dim_names or ())
    return [
        Problem(
            f"{name}: is not a DTensor over {names}, the axes that are left alone",
            f"Compute {name} from the arguments, which are DTensors over {names}; or "
            "make every axis local: leave axes= out.",
        )
    ]


def _gradient_problems(outputs: Sequence[Output], frame: Frame) -> list[Problem]:
    problems = []
    for output in outputs:
        if output.grad is None or output.layout is None:
            continue
        bad = layout_problem(output.grad, len(frame.axes), None)
        if bad is None and any(
            wanted != entry
            for wanted, entry in zip(output.grad, output.layout, strict=True)
            if not (entry.is_replicate() or entry.is_partial())
        ):
            bad = f"{format_layout(output.grad)} for {format_layout(output.layout)}"
        if bad:
            problems.append(
                Problem(
                    f"{output.name}: out_grad_placements = {bad}",
                    "Keep Shard entries as in out_placements; elsewhere write Replicate() "
                    "to let the whole gradient enter, or Partial() for an equal share.",
                )
            )
    return problems


def resolve_shape(
    output: Output,
    here: Sequence[int],
    arguments: Sequence[tuple[Sequence[int], Layout]],
    frame: Frame,
) -> tuple[tuple[int, ...], list[Problem]]:
    """The whole shape of an output of which ``here`` is on this rank."""
    assert output.layout is not None
    sources: list[Source] = []
    for shape, layout in arguments:
        sources += list_sources(shape, layout)
    if output.shape is None:
        try:
            whole = whole_shape(here, output.layout, sources, frame.grid)
        except UnknownSizeError as error:
            return tuple(here), [_unknown_shape(output, here, str(error))]
    else:
        whole = output.shape
    if len(whole) == len(here):
        expected = shape_here(whole, output.layout, frame.grid)
        if tuple(here) == expected:
            return whole, []
    return whole, [_wrong_shape(output, here, whole, frame)]


def _unknown_shape(output: Output, here: Sequence[int], why: str) -> Problem:
    layout = format_layout(output.layout or ())
    return Problem(
        f"{output.name}: has {list(here)} here and is {layout}; "
        f"its whole size is not known ({why})",
        f"Write the whole shape of {output.name} in out_shapes.",
    )


def _wrong_shape(
    output: Output, here: Sequence[int], whole: Sequence[int], frame: Frame
) -> Problem:
    assert output.layout is not None
    source = "out_shapes" if output.shape is not None else "the arguments"
    if len(whole) == len(here):
        expected = list(shape_here(whole, output.layout, frame.grid))
        share = f"this rank's part of which is {expected}"
    else:
        share = f"which has {format_count(len(whole), 'dim', 'dims')}"
    return Problem(
        f"{output.name}: has {list(here)} here and is {format_layout(output.layout)}; "
        f"{source} give it the whole shape {list(whole)}, {share}",
        f"Write the whole shape of {output.name} in out_shapes, and return the piece that "
        "DTensor's split gives to this rank (equal pieces, the last ones smaller).",
    )


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
    plan: CallPlan,
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
