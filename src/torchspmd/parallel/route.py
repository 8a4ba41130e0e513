"""The layouts of a tensor on its way through one parallel layer.

A layer gets its *input* in one layout, reads it in a second (*desired input*), computes in
a third (*computed*) and returns its *output* in a fourth. Gradients go the same way back.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchspmd.errors import LayoutError
from torchspmd.layout.placements import PARTIAL, positive_dim
from torchspmd.layout.shards import shard_size
from torchspmd.parallel.axis import Axis, check_even, gradient_layout
from torchspmd.parallel.redistribute import arriving, unwrap, wrap
from torchspmd.parallel.style import ParallelStyle, Place

_MAX_CALLS = 256  # shapes of inputs that one layer remembers


class Steps(NamedTuple):
    """The layouts of a route for tensors of one rank, shard dimensions from the front.

    The gradient of the output arrives as ``output_gradient`` and is used as
    ``computed_gradient``; that of the input is computed as ``desired_input_gradient`` and
    leaves as ``input_gradient``.
    """

    input: Placement
    desired_input: Placement
    computed: Placement
    output: Placement
    output_gradient: Placement
    computed_gradient: Placement
    desired_input_gradient: Placement
    input_gradient: Placement


class Value(NamedTuple):
    """An input as the layer got it: this rank's part, its layout, the whole's shape.

    ``gradient`` is the layout in which the input's gradient leaves the layer.
    """

    tensor: torch.Tensor
    layout: Placement
    shape: tuple[int, ...]
    gradient: Placement


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """The four layouts of one placed module, and what its errors need to say.

    Attributes:
        axis: The mesh axis it lies on.
        where: How errors name the module: its path, its style and its mesh.
        style: The style's name, for texts.
        input: Layout of an input that is a plain tensor.
        desired_input: Layout that the computation reads.
        computed: Layout that the computation writes.
        output: Layout that the module returns.
        local_output: Return this rank's part, not a DTensor.
        calls: What a layer worked out for plain inputs of a shape; see ``remember``.
    """

    axis: Axis
    where: str
    style: str
    input: Placement
    desired_input: Placement
    computed: Placement
    output: Placement
    local_output: bool
    calls: dict[torch.Size, Any] = field(default_factory=dict, repr=False)
    _steps: dict[tuple[int, int], Steps] = field(default_factory=dict, repr=False)

    def steps(self, input_ndim: int, output_ndim: int) -> Steps:
        """The layouts for tensors with these numbers of dimensions."""
        key = (input_ndim, output_ndim)
        steps = self._steps.get(key)
        if steps is None:
            steps = self._steps[key] = _build_steps(self, input_ndim, output_ndim)
        return steps

    def remember(self, shape: torch.Size, call: Any) -> None:
        """Keep what was worked out for plain inputs of this shape."""
        if len(self.calls) >= _MAX_CALLS:
            self.calls.clear()
        self.calls[shape] = call

    def __reduce__(self) -> tuple[Any, ...]:
        values = (self.axis, self.where, self.style, self.input, self.desired_input)
        return _rebuild, (*values, self.computed, self.output, self.local_output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __str__(self) -> str:
        return f"{self.style} on {self.axis.name}={self.axis.size}"


class RoutedModule(nn.Module):
    """Base of the modules that compute on shards."""

    route: Route

    def extra_repr(self) -> str:
        """The layer's settings and its style."""
        return f"{super().extra_repr()}, {self.route}"


def _rebuild(*values: Any) -> Route:
    names = ("axis", "where", "style", "input", "desired_input", "computed", "output")
    return Route(**dict(zip((*names, "local_output"), values, strict=True)))


def build_route(style: ParallelStyle, module: nn.Module, place: Place) -> Route:
    """The route of a module with one input, from the layouts of its style."""
    layouts = style.layouts(module)
    assert layouts is not None
    (given,), (desired,) = layouts.inputs, layouts.desired_inputs
    assert given is not None and desired is not None
    return Route(
        axis=place.axis,
        where=place.where(style),
        style=type(style).__name__,
        input=given,
        desired_input=desired,
        computed=layouts.computed,
        output=layouts.output,
        local_output=layouts.local_output,
    )


def _build_steps(route: Route, input_ndim: int, output_ndim: int) -> Steps:
    given = _checked(route, "input_layouts", route.input, input_ndim)
    desired = positive_dim(route.desired_input, input_ndim)
    computed = positive_dim(route.computed, output_ndim)
    output = _checked(route, "output_layouts", route.output, output_ndim)
    is_whole = type(desired) is Replicate
    return Steps(
        input=given,
        desired_input=given if given == desired else desired,
        computed=computed,
        output=computed if computed == output else output,
        output_gradient=gradient_layout(output),
        computed_gradient=gradient_layout(computed),
        # Ranks read the same whole input and compute different parts of the output.
        desired_input_gradient=PARTIAL if is_whole else desired,
        input_gradient=gradient_layout(given),
    )


def _checked(route: Route, argument: str, layout: Placement, ndim: int) -> Placement:
    if type(layout) is Shard and not -ndim <= layout.dim < ndim:
        raise LayoutError(
            f"{route.where}: {argument} is {layout!r}, the tensor has {ndim} dimensions. "
            f"Use a dimension from {-ndim} to {ndim - 1}."
        )
    return positive_dim(layout, ndim)


def check_tensor(value: object, route: Route) -> None:
    """Raise for an input that is not a tensor."""
    if not isinstance(value, torch.Tensor):
        raise LayoutError(
            f"{route.where}: expecting input of the module to be a torch.Tensor or "
            f"DTensor, but got {_describe(value)}."
        )


def enter(tensor: torch.Tensor, route: Route, steps: Steps) -> Value:
    """An input of any kind as a plain tensor with its layout and whole shape."""
    axis = route.axis
    reduced, layout, shape = arriving(tensor, steps.input, axis, route.where)
    if isinstance(reduced, DTensor):
        gradient = gradient_layout(layout)
        computed = steps.desired_input_gradient
        # Through a computed mean DTensor takes no partial gradient.
        if reduced is tensor and (type(layout), type(computed)) == (Replicate, Partial):
            # Left as partial values: layers that share a DTensor, such as the three
            # projections of attention, then sum once and not once each.
            gradient = computed
        shard = unwrap(reduced, axis, gradient)
        return Value(shard, layout, shape, gradient)
    if type(layout) is Shard and layout.dim < tensor.ndim - 1:
        if axis.replicas is not None and not torch.compiler.is_compiling():
            axis.replicas.note_part(route.where, tensor, layout.dim)
    return Value(tensor, layout, shape, steps.input_gradient)


def enter_features(
    tensor: torch.Tensor, route: Route, steps: Steps, features: int
) -> Value:
    """Like ``enter``, for an input whose last dimension is known to have ``features``."""
    value = enter(tensor, route, steps)
    last = tensor.ndim - 1
    if type(value.layout) is Shard and value.layout.dim == last:
        axis = route.axis
        expected = shard_size(features, axis.size, axis.rank)
        if value.tensor.size(last) == expected:
            return value._replace(shape=(*value.shape[:last], features))
    elif value.shape[last] == features:
        return value
    raise LayoutError(_wrong_features(tensor, value, route, features))


def _wrong_features(
    tensor: torch.Tensor, value: Value, route: Route, features: int
) -> str:
    axis, last = route.axis, tensor.ndim - 1
    layout = value.layout
    expected = features
    if type(layout) is Shard and layout.dim == last:
        expected = shard_size(features, axis.size, axis.rank)
    got = value.tensor.size(last)
    text = (
        f"{route.where}: the input is {_describe(tensor)} and is taken as {layout!r}; its "
        f"last dimension must then be {expected} on this rank "
        f"(of {features} in all), not {got}."
    )
    if got == features:
        return f"{text} It looks whole: use input_layouts=Replicate()."
    if got == shard_size(features, axis.size, axis.rank):
        return f"{text} It looks sharded: use input_layouts=Shard(-1)."
    return f"{text} Pass the output of the layer before it in that layout."


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        kind = "DTensor" if isinstance(value, DTensor) else "tensor"
        return f"a {kind} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def leave(
    tensor: torch.Tensor, route: Route, steps: Steps, shape: tuple[int, ...]
) -> torch.Tensor:
    """What the module returns: the local tensor, or a DTensor around it."""
    if route.local_output:
        check_even(shape, steps.output, route.axis, route.where)
        return tensor
    return wrap(tensor, steps.output, route.axis, shape)
