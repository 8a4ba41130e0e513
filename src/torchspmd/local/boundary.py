"""The two autograd functions at the boundary of a region.

The layouts of gradients are known only after the function has run, so each tensor that
enters or leaves has a ``Port`` that is completed then.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from torchspmd import _torch
from torchspmd.errors import LayoutError
from torchspmd.layout.placements import Layout, format_layout
from torchspmd.local.check import Checker
from torchspmd.local.frame import Frame, shape_here, whole_stride
from torchspmd.local.gradient import count_shares
from torchspmd.local.specs import Problem, refuse


@dataclass(slots=True)
class Port:
    """One tensor that enters or leaves a region.

    Attributes:
        name: The argument or output, for messages.
        frame: Mesh and axes of the region.
        spec: The DTensor outside.
        grad: Layout of the gradient that leaves here, or enters; None until derived.
        is_leaf: The DTensor outside is a leaf, whose ``.grad`` gets its layout.
        checker: Compares ranks; None when checking is off.
    """

    name: str
    frame: Frame
    spec: Any
    grad: Layout | None = None
    is_leaf: bool = False
    checker: Checker | None = field(default=None)


def cached_spec(
    mesh: DeviceMesh,
    layout: Layout,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Any:
    """A DTensor spec; building one takes longer than the rest of entering."""
    try:
        return _spec(mesh, layout, shape, stride, dtype)
    except TypeError:  # symbolic sizes have no hash
        return _torch.strided_spec(mesh, layout, shape, stride, dtype)


_spec = lru_cache(maxsize=1024)(_torch.strided_spec)


def inside(local: torch.Tensor, frame: Frame, spec: Any) -> torch.Tensor:
    """What the function sees of an argument, outside of autograd.

    That is the local part, or a DTensor over the axes that are left alone.
    """
    if frame.rest is None:
        return local
    rest = frame.pick_rest(spec.placements)
    layout = frame.pick(spec.placements)
    shape = shape_here(tuple(spec.shape), layout, frame.grid)
    stride = whole_stride(shape, local.stride())
    inner = cached_spec(frame.rest, rest, shape, stride, local.dtype)
    return _torch.wrap_local(local, inner)


class Enter(torch.autograd.Function):
    """DTensor to what the function sees; its gradient gets the layout of the port."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, port: Port) -> torch.Tensor:
        """Return the local part, as a fresh tensor for autograd to write its history on."""
        ctx.port = port
        ctx.set_materialize_grads(False)
        local = _torch.finished(_torch.local_tensor(tensor))
        return inside(local.view_as(local), port.frame, port.spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[DTensor | None, None]:
        """Label the local gradient, and bring that of a leaf to the leaf's own layout."""
        if grad is None:
            return None, None
        port: Port = ctx.port
        if port.grad is None:
            raise LayoutError(_leaked(port.name))
        outside = _to_mesh(grad, port)
        if port.checker is not None:
            local = _torch.finished(_torch.local_tensor(outside))
            port.checker.check_gradient(local, port.grad, port.name)
        if port.is_leaf:
            outside = _to_own_layout(outside, port.spec.placements)
        return outside, None


def _to_own_layout(grad: DTensor, placements: Layout) -> DTensor:
    """The gradient of a leaf, reduced and cut like the leaf, for optimizers to read."""
    own = tuple(Replicate() if entry.is_partial() else entry for entry in placements)
    return grad if grad.placements == own else grad.redistribute(placements=own)


def _leaked(name: str) -> str:
    return (
        f"local_map: a gradient reached {name} through a tensor that did not leave the "
        "region as an output with a gradient. Return every tensor that the loss uses, "
        "and give it a layout in out_placements."
    )


def _to_mesh(grad: torch.Tensor, port: Port) -> DTensor:
    frame, spec, layout = port.frame, port.spec, port.grad
    assert layout is not None
    if frame.rest is not None:
        assert isinstance(grad, DTensor), type(grad)
        layout = frame.merge(layout, grad.placements)
        grad = grad.to_local()
    shape = tuple(spec.shape)
    # Of an expanded gradient, ranks with one row would tell other strides than ranks with
    # several, and torch 2.11 then communicates on some ranks alone.
    grad = grad.contiguous() if 0 in grad.stride() else grad
    stride = whole_stride(shape, grad.stride())
    if torch.is_grad_enabled():  # create_graph=True: the labelling must be recorded
        return DTensor.from_local(
            grad, frame.mesh, layout, shape=torch.Size(shape), stride=stride
        )
    outer = cached_spec(frame.mesh, layout, shape, stride, grad.dtype)
    return cast(DTensor, _torch.wrap_local(grad, outer))


class Leave(torch.autograd.Function):
    """What the function returned to a DTensor; its gradient enters as the port says."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, port: Port) -> DTensor:
        """Wrap the local part in the layout that was declared."""
        ctx.port = port
        ctx.set_materialize_grads(False)
        return outside(value, port.frame, port.spec)

    @staticmethod
    def backward(ctx: Any, grad: DTensor | None) -> tuple[torch.Tensor | None, None]:
        """Bring the gradient to the layout of the port, and divide it where it says so."""
        if grad is None:
            return None, None
        port: Port = ctx.port
        frame, layout = port.frame, port.grad
        assert layout is not None, port.name
        whole = tuple(Replicate() if e.is_partial() else e for e in layout)
        target = frame.merge(whole, frame.pick_rest(grad.placements))
        if grad.placements != target:
            grad = grad.redistribute(placements=target)
        local = _torch.finished(grad.to_local())
        num_shares = count_shares(layout, frame.axes)
        if num_shares > 1:
            local = local / num_shares
        return _to_inside(local, grad, frame), None


def _to_inside(local: torch.Tensor, grad: DTensor, frame: Frame) -> torch.Tensor:
    if frame.rest is None or not torch.is_grad_enabled():
        return inside(local, frame, _torch.spec(grad))
    layout = frame.pick(grad.placements)
    shape = shape_here(tuple(grad.shape), layout, frame.grid)
    return DTensor.from_local(
        local,
        frame.rest,
        frame.pick_rest(grad.placements),
        shape=torch.Size(shape),
        stride=whole_stride(shape, local.stride()),
    )


def outside(value: torch.Tensor, frame: Frame, spec: Any) -> DTensor:
    """The DTensor around what the function returned, outside of autograd."""
    local = value if frame.rest is None else _torch.local_tensor(cast(DTensor, value))
    fresh = local.view_as(local)
    # A collective that still runs keeps its flag, and DTensor wants the two to agree.
    return cast(DTensor, _torch.wrap_local(fresh, spec, fresh.requires_grad))


# ----------------------------------------------------------------------------
# Writes of a function into arguments that were redistributed for it.

_COPY_RULE = "A redistributed argument is a copy: what is written into it is lost."


class _Copy(NamedTuple):
    name: str
    placements: tuple[Placement, ...]
    local: torch.Tensor
    version: int


class Copies:
    """The redistributed arguments of one call."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def add(self, name: str, given: DTensor, seen: torch.Tensor) -> None:
        """Note what the function sees of an argument's copy."""
        local = _torch.local_tensor(seen) if isinstance(seen, DTensor) else seen
        version = _torch.version_of(local)
        self._copies.append(_Copy(name, given.placements, local, version))

    def refuse_writes(self, function: str, frame: Frame) -> None:
        """Raise if the function wrote into a copy."""
        problems = [
            Problem(
                f"{copy.name}: has {format_layout(copy.placements)}, and the function "
                "wrote into the copy that redistribute_inputs=True made of it",
                f"Redistribute {copy.name} before the call and keep that DTensor; or "
                "return the new value as an output.",
            )
            for copy in self._copies
            if _torch.version_of(copy.local) != copy.version
        ]
        refuse(function, frame.mesh, "a write would be lost", problems, _COPY_RULE)


def with_version(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; for an inference tensor, another one on its memory that counts writes."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        counted = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return counted.set_(
            tensor.untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )
