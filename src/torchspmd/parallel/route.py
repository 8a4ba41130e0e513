"""The way of a tensor through one parallel layer, as data.

A layer is *given* an input in one layout, *needs* it in another, *makes* its output in a
third, and is *wanted* to hand it on in a fourth. Gradients go the same way back.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchspmd.errors import LayoutError
from torchspmd.layout.placements import (
    positive_dim,
)
from torchspmd.layout.shards import shard_size
from torchspmd.parallel.axis import (
    Axis,
    describe_uneven,
    gradient_layout,
    is_uneven,
    layout_of,
)
from torchspmd.parallel.redistribute import reduce_other_partials, unwrap, wrap
from torchspmd.parallel.style import ParallelStyle, Place

_MAX_CALLS = 256  # shapes of inputs that one layer remembers


class Steps(NamedTuple):
    """The layouts of a route for tensors of one rank, shard dimensions from the front."""

    given: Placement
    needed: Placement
    made: Placement
    wanted: Placement
    # The gradient of the output arrives as `wanted_gradient` and is used as
    # `made_gradient`; that of the input is made as `input_gradient`.
    wanted_gradient: Placement
    made_gradient: Placement
    input_gradient: Placement
    given_gradient: Placement


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
        given: Layout of an input that is a plain tensor.
        needed: Layout that the computation reads.
        made: Layout that the computation writes.
        wanted: Layout that the module returns.
        local_output: Return this rank's part, not a DTensor.
        calls: What a layer worked out for plain inputs of a shape; see ``remember``.
    """

    axis: Axis
    where: str
    style: str
    given: Placement
    needed: Placement
    made: Placement
    wanted: Placement
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
        values = (self.axis, self.where, self.style, self.given, self.needed)
        return _rebuild, (*values, self.made, self.wanted, self.local_output)

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
    names = ("axis", "where", "style", "given", "needed", "made", "wanted")
    return Route(**dict(zip((*names, "local_output"), values, strict=True)))


def build_route(style: ParallelStyle, module: nn.Module, place: Place) -> Route:
    """The route of a module with one input, from the layouts of its style."""
    layouts = style.layouts(module)
    assert layouts is not None
    (given,), (needed,) = layouts.given, layouts.needed
    assert given is not None and needed is not None
    return Route(
        axis=place.axis,
        where=place.where(style),
        style=type(style).__name__,
        given=given,
        needed=needed,
        made=layouts.made,
        wanted=layouts.wanted,
        local_output=layouts.local_output,
    )


def _build_steps(route: Route, input_ndim: int, output_ndim: int) -> Steps:
    given = _checked(route, "input_layouts", route.given, input_ndim)
    needed = positive_dim(route.needed, input_ndim)
    made = positive_dim(route.made, output_ndim)
    wanted = _checked(route, "output_layouts", route.wanted, output_ndim)
    input_gradient = Partial() if type(needed) is Replicate else needed
    return Steps(
        given=given,
        needed=given if given == needed else needed,
        made=made,
        wanted=made if made == wanted else wanted,
        wanted_gradient=gradient_layout(wanted),
        made_gradient=gradient_layout(made),
        input_gradient=input_gradient,
        given_gradient=gradient_layout(given),
    )


def _checked(route: Route, argument: str, layout: Placement, ndim: int) -> Placement:
    if type(layout) is Shard and not -ndim <= layout.dim < ndim:
        raise LayoutError(
            f"{route.where}: {argument} is {layout!r}, the tensor has {ndim} dimensions. "
            f"Use a dimension from {-ndim} to {ndim - 1}."
        )
    return positive_dim(layout, ndim)


def check_tensor(value: object, route: Route) -> None:
    """Raise for an input that is no tensor."""
    if not isinstance(value, torch.Tensor):
        raise LayoutError(
            f"{route.where}: expecting input of the module to be a torch.Tensor or "
            f"DTensor, but got {_describe(value)}."
        )


def enter(tensor: torch.Tensor, route: Route, steps: Steps) -> Value:
    """An input of any kind as a plain tensor with its layout and whole shape.

    The shards of a plain tensor are taken as even; only a DTensor says otherwise.
    """
    if isinstance(tensor, DTensor):
        reduced = reduce_other_partials(tensor)
        # Through a computed mean DTensor takes no partial gradient.
        is_reduced, tensor = reduced is not tensor, reduced
        layout = layout_of(tensor, route.axis, route.where)
        gradient = gradient_layout(layout)
        is_partial = type(layout) is Replicate and type(steps.input_gradient) is Partial
        if is_partial and not is_reduced:
            # Left as partial values: layers that share a DTensor, such as the three
            # projections of attention, then sum once and not once each.
            gradient = steps.input_gradient
            return Value(
                unwrap(tensor, route.axis, gradient),
                layout,
                tuple(tensor.shape),
                gradient,
            )
        return Value(unwrap(tensor, route.axis), layout, tuple(tensor.shape), gradient)
    shape = tuple(tensor.shape)
    given = steps.given
    if type(given) is Shard:
        dim, size = given.dim, tensor.size(given.dim)
        shape = (*shape[:dim], size * route.axis.size, *shape[dim + 1 :])
    return Value(tensor, given, shape, steps.given_gradient)


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
        check_even(route, steps.wanted, shape)
        return tensor
    return wrap(tensor, steps.wanted, route.axis, shape)


def check_even(route: Route, layout: Placement, shape: tuple[int, ...]) -> None:
    """Raise for a local output that is one of uneven parts of a whole of this shape."""
    if is_uneven(shape, layout, route.axis):
        raise LayoutError(describe_uneven(shape, layout, route.axis, route.where))
