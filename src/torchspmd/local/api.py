"""``local_map``: the public face of manual regions."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torchspmd import _torch
from torchspmd.errors import UsageError
from torchspmd.local.arguments import (
    CallPlan,
    DTensorLeaf,
    Options,
    build_plan,
    find_dtensors,
    parameter_names,
)
from torchspmd.local.call import RegionCall, keep
from torchspmd.local.specs import Spec
from torchspmd.local.traced import call_traced

# ----------------------------------------------------------------------------
# A function with its layouts, and the plans of the kinds of calls that it has seen.

# Types that need no tree to be flattened; most calls have only these.
_PLAIN = frozenset({DTensor, torch.Tensor, int, float, bool, str, type(None)})


class Region:
    """A function together with the layouts of what goes in and out."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._plans: dict[Any, CallPlan] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function once on local tensors."""
        if torch.compiler.is_dynamo_compiling():
            return call_traced(self.options, args, kwargs)
        if "torch._dynamo" in sys.modules:
            return _untraced()(self, args, kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function once on local tensors, while nothing is compiled."""
        if kwargs or not all(type(arg) in _PLAIN for arg in args):
            leaves, structure = _torch.flatten_tree((args, kwargs))
        else:
            leaves, structure = list(args), len(args)
        tensors = find_dtensors(leaves)
        if not tensors:
            return self.options.function(*args, **kwargs)
        plan = self._plan(args, kwargs, leaves, structure, tensors)
        call = RegionCall(self.options, plan, tensors)
        values = call.enter(leaves)
        if isinstance(structure, int):
            args = tuple(values)
        else:
            args, kwargs = _torch.unflatten_tree(values, structure)
        return call.leave(call.run(args, kwargs))

    def _plan(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        leaves: Sequence[Any],
        structure: Any,
        tensors: Sequence[DTensorLeaf],
    ) -> CallPlan:
        on_mesh = [
            (each.leaf, each.slot and each.slot[0], t.placements, t.device_mesh, t.ndim)
            for each in tensors
            for t in [each.tensor]
        ]
        key = (structure, tuple(on_mesh), tuple([type(leaf) for leaf in leaves]))
        plan = self._plans.get(key)
        if plan is None:
            plan = build_plan(self.options, args, kwargs, tensors)
            keep(self._plans, key, plan)
        return plan


@functools.cache
def _untraced() -> Callable[[Region, tuple[Any, ...], dict[str, Any]], Any]:
    """``Region.run`` where compiled code fell back to eager: Dynamo must not enter it.

    Made on demand, as it imports all of Dynamo.
    """
    return torch.compiler.disable(Region.run)


Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def local_map(
    func: Callable[..., Any],
    out_placements: Spec = ...,
    in_placements: Spec = ...,
    in_grad_placements: Spec = ...,
    device_mesh: DeviceMesh | None = ...,
    *,
    redistribute_inputs: bool = ...,
    out_grad_placements: Spec = ...,
    out_shapes: Spec = ...,
    axes: Sequence[str] | None = ...,
    check: bool | None = ...,
) -> Callable[..., Any]: ...


@overload
def local_map(
    func: None = ...,
    out_placements: Spec = ...,
    in_placements: Spec = ...,
    in_grad_placements: Spec = ...,
    device_mesh: DeviceMesh | None = ...,
    *,
    redistribute_inputs: bool = ...,
    out_grad_placements: Spec = ...,
    out_shapes: Spec = ...,
    axes: Sequence[str] | None = ...,
    check: bool | None = ...,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...


def local_map(  # noqa: PLR0913  (the first six are torch's own)
    func: Callable[..., Any] | None = None,
    out_placements: Spec = None,
    in_placements: Spec = None,
    in_grad_placements: Spec = None,
    device_mesh: DeviceMesh | None = None,
    *,
    redistribute_inputs: bool = False,
    out_grad_placements: Spec = None,
    out_shapes: Spec = None,
    axes: Sequence[str] | None = None,
    check: bool | None = None,
) -> Callable[..., Any]:
    """Make a function of local tensors one of DTensors, with gradients that are right.

    The function gets this rank's part of every DTensor, and what it returns is put back
    on the mesh. The layout of each gradient is derived from the layouts of arguments and
    outputs; where it does not follow, the call is refused. A call without DTensors runs
    the function as it is. ``docs/local_map.md`` has the rules.

    Args:
        func: The function. Left out, ``local_map`` is a decorator.
        out_placements: The layout of each output: a list of placements, one for each
            mesh axis. For several outputs, a tree of layouts shaped like them or a prefix
            of it; ``None`` for what is no tensor.
        in_placements: The layout that each argument must have: a tuple with one entry for
            each argument, each a layout, a tree of layouts, or ``None`` to pass it as it
            is; or a dict by parameter name; or one layout for all.
        in_grad_placements: The layout of each argument's local gradient, written like
            ``in_placements``; ``None`` to derive it.
        device_mesh: The mesh. By default the arguments', anew for each call.
        redistribute_inputs: Bring arguments of another layout to ``in_placements`` first
            instead of refusing them.
        out_grad_placements: What enters the function backwards for each output:
            ``Replicate()`` the whole gradient on every rank, ``Partial()`` an equal share
            of it; by default derived.
        out_shapes: The whole shape of each output, where it does not follow from the
            arguments; a tree like ``out_placements``.
        axes: Names of the mesh axes that the function is local over; by default all.
            Over the others its arguments stay DTensors, and layouts have no entry.
        check: Compare outputs and gradients across ranks; by default only when
            ``TORCHSPMD_CHECK=1``. Costs collectives, which are marked as checks.

    Returns:
        The mapped function, with the name, signature and docstring of ``func``.

    Raises:
        LayoutError: Layouts, shapes or meshes do not fit, or a gradient's layout does not
            follow; the text says what to write.
        CheckError: A check found ranks that hold other values than declared.

    Example:
        >>> import torch
        >>> from torch.distributed.tensor import Replicate, Shard, distribute_tensor
        >>> from torchspmd.testing import fake_mesh
        >>> @local_map(out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]))
        ... def project(x, weight):
        ...     return x @ weight
        >>> with fake_mesh(4, ("tp",)) as mesh:
        ...     x = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)])
        ...     weight = distribute_tensor(torch.ones(2, 3), mesh, [Replicate()])
        ...     y = project(x, weight)
        >>> y.shape, y.to_local().shape
        (torch.Size([8, 3]), torch.Size([2, 3]))
    """
    options = functools.partial(
        _map,
        out_placements=out_placements,
        in_placements=in_placements,
        in_grad_placements=in_grad_placements,
        out_grad_placements=out_grad_placements,
        out_shapes=out_shapes,
        device_mesh=device_mesh,
        axes=_axes(axes),
        redistribute_inputs=redistribute_inputs,
        check=check,
    )
    return options if func is None else options(func)


def _axes(axes: Sequence[str] | None) -> tuple[str, ...] | None:
    if isinstance(axes, str) or (axes is not None and not axes):
        raise UsageError(
            f"local_map(axes={axes!r}): pass a tuple of mesh axis names, as in "
            "axes=('tp',), or leave it out for all axes."
        )
    return None if axes is None else tuple(axes)


def _map(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    if not callable(function):
        raise UsageError(
            f"local_map: the first argument is a {type(function).__name__}, no function. "
            "As a decorator it takes keyword arguments: @local_map(out_placements=...)."
        )
    region = Region(
        Options(
            function=function,
            name=getattr(function, "__qualname__", type(function).__qualname__),
            parameters=parameter_names(function),
            **options,
        )
    )

    def mapped(*args: Any, **kwargs: Any) -> Any:
        return region(args, kwargs)

    # Dynamo keeps what it compiled, and where it gave up, by code object: each mapped
    # function has its own.
    mapped.__code__ = mapped.__code__.replace()
    return functools.update_wrapper(mapped, function, updated=())
