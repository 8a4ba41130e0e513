"""Sequence-parallel: norms and dropout on a part of the sequence."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from torchspmd import _torch
from torchspmd.errors import LayoutError
from torchspmd.parallel.axis import check_even
from torchspmd.parallel.dispatch import run_on_dtensors
from torchspmd.parallel.parameters import (
    describe_computed,
    local_shards,
    place_buffers,
    place_parameter,
    sum_over_axis,
    unwrap_parameter,
    wrap_gradient,
)
from torchspmd.parallel.redistribute import (
    begin_backward,
    change_layout,
    move,
    take_shard,
    unwrap_gradient,
)
from torchspmd.parallel.route import (
    Route,
    RoutedModule,
    Steps,
    build_route,
    check_tensor,
    enter,
    leave,
)
from torchspmd.parallel.style import (
    Place,
    PlacedStyle,
    StyleLayouts,
    describe_placed,
    describe_styled,
    mark_styled,
)

# ----------------------------------------------------------------------------
# Norms and dropout on this rank's part of the sequence, with replicated parameters.


class LocalLayerNorm(RoutedModule, nn.LayerNorm):
    """A LayerNorm whose forward runs on this rank's part of the sequence."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The normalised input; the parameters' gradients are summed over the ranks."""
        route = self.route
        local, steps, shape = _enter_shard(input, route, len(self.normalized_shape))
        if not torch.compiler.is_compiling() and not _torch.is_autocast_enabled():
            if route.local_output:
                check_even(shape, steps.output, route.axis, route.where)
            call = NormCall(route, steps.output, shape, self.normalized_shape, self.eps)
            return _LocalNorm.apply(local, self.weight, self.bias, call)
        weight, bias = local_shards([self.weight, self.bias], route.axis)
        output = F.layer_norm(local, self.normalized_shape, weight, bias, self.eps)
        return leave(output, route, steps, shape)


class LocalRMSNorm(RoutedModule, nn.RMSNorm):
    """An RMSNorm whose forward runs on this rank's part of the sequence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The normalised input; the weight's gradient is summed over the ranks."""
        route = self.route
        local, steps, shape = _enter_shard(x, route, len(self.normalized_shape))
        (weight,) = local_shards([self.weight], route.axis)
        output = F.rms_norm(local, self.normalized_shape, weight, self.eps)
        return leave(output, route, steps, shape)


class LocalDropout(RoutedModule, nn.Dropout):
    """A Dropout whose forward runs on this rank's part of the sequence."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The input with the elements dropped that one device would drop.

        Every rank draws the mask of the whole tensor and uses its part: ranks with one
        seed then stay in step, where drawing the part alone would repeat one mask.
        """
        route = self.route
        local, steps, shape = _enter_shard(input, route, 0)
        if self.training and self.p > 0:
            whole = F.dropout(local.new_ones(shape), self.p)
            assert type(steps.desired_input) is Shard
            local = local * take_shard(whole, steps.desired_input.dim, route.axis)
        return leave(local, route, steps, shape)


class NormCall(NamedTuple):
    """What one call of a LayerNorm needs to know besides tensors."""

    route: Route
    layout: Placement
    shape: tuple[int, ...]
    normalized: tuple[int, ...]
    eps: float


class _LocalNorm(torch.autograd.Function):
    """LayerNorm, the sum of its parameters' gradients and its DTensor, as one step."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        call: NormCall,
    ) -> torch.Tensor:
        (local_weight, weight_spec), (local_bias, bias_spec) = map(
            unwrap_parameter, (weight, bias)
        )
        output, mean, scale = torch.native_layer_norm(
            input, call.normalized, local_weight, local_bias, call.eps
        )
        ctx.call, ctx.specs = call, (weight_spec, bias_spec)
        ctx.save_for_backward(input, mean, scale, local_weight, local_bias)
        if call.route.local_output:
            return output
        spec = call.route.axis.spec(call.layout, call.shape, output.dtype)
        return _torch.wrap_local(output, spec)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        call = ctx.call
        axis, layout = call.route.axis, call.layout
        begin_backward(LocalLayerNorm.__name__, gradient, axis)
        local, arriving = unwrap_gradient(gradient, layout)
        local = move(local, arriving, layout, axis, call.shape)
        input, mean, scale, weight, bias = ctx.saved_tensors
        needs = list(ctx.needs_input_grad[:3])
        of_input, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            local, input, call.normalized, mean, scale, weight, bias, needs
        )
        of_weight, of_bias = sum_over_axis((of_weight, of_bias), axis)
        weight_spec, bias_spec = ctx.specs
        parameters = (
            wrap_gradient(of_weight, weight_spec),
            wrap_gradient(of_bias, bias_spec),
        )
        return of_input, *parameters, None


def _enter_shard(
    tensor: Any, route: Route, num_normalized: int
) -> tuple[torch.Tensor, Steps, tuple[int, ...]]:
    """The part of the sequence that this rank computes on."""
    check_tensor(tensor, route)
    steps = route.steps(tensor.ndim, tensor.ndim)
    value = enter(tensor, route, steps)
    needed = steps.desired_input
    assert type(needed) is Shard, needed
    if needed.dim >= tensor.ndim - num_normalized:
        raise LayoutError(
            f"{route.where}: the sequence dimension {needed.dim} of an input of shape "
            f"{tuple(tensor.shape)} is one that the norm reduces over. Pass "
            "sequence_dim= the dimension of the sequence."
        )
    local = value.tensor
    if isinstance(tensor, DTensor):
        local = change_layout(local, value.layout, needed, route.axis, value.shape)
    return local, steps, value.shape


_LOCAL_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: LocalLayerNorm,
    nn.RMSNorm: LocalRMSNorm,
    nn.Dropout: LocalDropout,
}


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(PlacedStyle):
    """Run a norm or a dropout on this rank's part of the sequence.

    The parameters are replicated; every rank sees other tokens, so their gradients are
    summed over the ranks at the end of the layer's backward, in one all-reduce. A plain
    input is taken as this rank's part of the sequence, a DTensor is redistributed.
    LayerNorm, RMSNorm and Dropout compute on local tensors, other modules on DTensors.

    Args:
        sequence_dim: Dimension of the input that is the sequence.
        use_local_output: Return this rank's tensor, or a DTensor (the default).

    Example:
        >>> import torch
        >>> from torchspmd.testing import fake_mesh
        >>> from torchspmd.parallel import parallelize_module
        >>> with fake_mesh(4, ("tp",)) as mesh:
        ...     norm = parallelize_module(nn.LayerNorm(8), mesh, SequenceParallel())
        ...     norm(torch.ones(2, 3, 8)).shape
        torch.Size([2, 12, 8])
    """

    sequence_dim: int = 1
    use_local_output: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.sequence_dim, int):
            raise LayoutError(
                f"SequenceParallel: sequence_dim is {self.sequence_dim!r}; pass the "
                "number of a dimension."
            )

    @property
    def sequence_sharding(self) -> tuple[Placement]:
        """The layout of input and output."""
        return (Shard(self.sequence_dim),)

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Everything is replicated."""
        return {name: Replicate() for name, _ in module.named_parameters()}

    def layouts(self, module: nn.Module) -> StyleLayouts:
        """A part of the sequence, everywhere."""
        (part,) = self.sequence_sharding
        return StyleLayouts((part,), (part,), part, part, self.use_local_output)

    def find_problems(self, module: nn.Module) -> list[str]:
        """Any module that has no layout yet will do."""
        placed = describe_placed(module) or describe_styled(module, "forward")
        return placed + describe_computed(module)

    def place_fitting(self, module: nn.Module, place: Place) -> None:
        """Replicate the parameters and let the module compute on its part."""
        for part in module.modules():
            for name, _ in list(part.named_parameters(recurse=False)):
                place_parameter(
                    part, name, Replicate(), place.axis, place.src_data_rank
                )
            place_buffers(part, place.axis, place.src_data_rank)
        _compute_on_part(module, build_route(self, module, place))
        mark_styled(module, "forward", type(self).__name__)


def _compute_on_part(module: nn.Module, route: Route) -> None:
    local = _LOCAL_FORMS.get(type(module))
    if local is None or "forward" in vars(module):
        run_on_dtensors(module, route)
        return
    module.__class__ = local
    module.route = route  # type: ignore[assignment]
