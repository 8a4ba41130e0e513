"""The same call while torch.compile traces it.

Dynamo knows ``to_local`` and ``from_local`` but not our own crossings, and there is no
recorded graph to read. So gradients are derived from layouts alone, before the function
runs, and what would need more is refused: compiled code then falls back to eager.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.layout.placements import Layout
from torchspmd.local.arguments import CallPlan, Options, build_plan, find_dtensors
from torchspmd.local.frame import whole_stride
from torchspmd.local.gradient import (
    BoundaryTensor,
    Gradients,
    count_shares,
    derive,
    entering_layout,
)
from torchspmd.local.outputs import build_outputs, build_shape
from torchspmd.local.specs import (
    Problem,
    find_written,
    format_path,
    is_layout,
    list_ends,
    refuse,
)

_RULE = "While torch.compile traces, only layouts are known."


class Share(torch.autograd.Function):
    """The value itself; backwards, an equal share of the gradient for each rank."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, num_shares: int) -> torch.Tensor:
        """Pass the value on."""
        ctx.num_shares = num_shares
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Divide the gradient."""
        return grad / ctx.num_shares, None


def call_traced(options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the function once on local tensors, with operators that Dynamo knows."""
    leaves, structure = _torch.flatten_tree((args, kwargs))
    tensors = find_dtensors(leaves)
    if not tensors:
        return options.function(*args, **kwargs)
    plan = build_plan(options, args, kwargs, tensors)
    _check_supported(options, plan, [t.slot is not None for t in tensors])
    on_mesh = [found.tensor for found in tensors]
    gradients = _derive(options, plan, on_mesh)
    shapes = [tensor.shape for tensor in on_mesh]
    for index, found in enumerate(tensors):
        target = plan.arguments[index].target
        grad = gradients.arguments[index] if gradients is not None else None
        leaves[found.leaf] = _enter(found.tensor, target, grad)
    args, kwargs = _torch.unflatten_tree(leaves, structure)
    result = options.function(*args, **kwargs)
    return _leave(options, plan, shapes, gradients, result)


def _check_supported(
    options: Options, plan: CallPlan, in_modules: Sequence[bool]
) -> None:
    problems = []
    eager = "Call it outside of the compiled function, or compile without fullgraph."
    if plan.frame.rest is not None:
        problems.append(Problem(f"axes={options.axes!r}: leaves axes alone", eager))
    if any(in_modules):
        problems.append(Problem("a module with DTensor parameters is passed", eager))
    what = "not supported by torch.compile"
    refuse(options.name, plan.frame.mesh, what, problems, _RULE)


def _derive(
    options: Options, plan: CallPlan, tensors: Sequence[DTensor]
) -> Gradients | None:
    has_grad = torch.is_grad_enabled()
    arguments = [
        BoundaryTensor(a.name, a.layout, has_grad and t.requires_grad, a.written_grad)
        for a, t in zip(plan.arguments, tensors, strict=True)
    ]
    if not any(argument.needs_grad for argument in arguments):
        return None
    outputs = [
        BoundaryTensor(
            f"output{format_path(path)}", tuple(layout), True, _written(options, path)
        )
        for path, layout in list_ends(options.out_placements)
        if is_layout(layout)
    ]
    gradients, problems = derive(arguments, outputs, plan.frame.axes, None)
    what = "a gradient's layout cannot be derived"
    refuse(options.name, plan.frame.mesh, what, problems, _RULE)
    return gradients


def _written(options: Options, path: Any) -> Layout | None:
    spec = options.out_grad_placements
    if spec is None or is_layout(spec):
        return spec and tuple(spec)
    return find_written(spec, path, "out_grad_placements").layout


def _enter(tensor: DTensor, target: Layout | None, grad: Layout | None) -> torch.Tensor:
    if target is not None:
        tensor = tensor.redistribute(placements=target)
    if grad is None:
        return tensor.to_local()
    if any(entry.is_partial() for entry in grad):
        # The identity; its backward brings the gradient to the tensor's own layout.
        tensor = tensor.redistribute(placements=tensor.placements)
    return tensor.to_local(grad_placements=grad)


def _leave(
    options: Options,
    plan: CallPlan,
    shapes: Sequence[Any],
    gradients: Gradients | None,
    result: Any,
) -> Any:
    values, structure = _torch.flatten_tree(result)
    outputs = build_outputs(options, plan.frame, values, result)
    for index, output in enumerate(outputs):
        if output.layout is None:
            continue
        value = values[index]
        shape = build_shape(options, plan, output, value.shape, shapes)
        if gradients is not None and value.requires_grad:
            tensor = BoundaryTensor(output.name, output.layout, True, output.grad)
            entering = entering_layout(tensor, gradients.works, plan.frame.axes)
            num_shares = count_shares(entering or (), plan.frame.axes)
            value = Share.apply(value, num_shares) if num_shares > 1 else value
        values[index] = DTensor.from_local(
            value,
            plan.frame.mesh,
            output.layout,
            run_check=False,
            shape=torch.Size(shape),
            stride=whole_stride(shape, value.stride()),
        )
    return _torch.unflatten_tree(values, structure)
