"""Sequence-parallel: norms and dropout on a part of the sequence."""

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from torchspmd.errors import LayoutError, UnsupportedModuleError
from torchspmd.parallel.computed import describe_computed
from torchspmd.parallel.dispatch import run_on_dtensors
from torchspmd.parallel.norm import LocalDropout, LocalLayerNorm, LocalRMSNorm
from torchspmd.parallel.parameters import place_buffers, place_parameter
from torchspmd.parallel.route import Route
from torchspmd.parallel.style import (
    Place,
    PlacedStyle,
    describe_placed,
    describe_styled,
    mark_styled,
)

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

    def find_problems(self, module: nn.Module) -> list[str]:
        """Any module that has no layout yet will do."""
        placed = describe_placed(module) or describe_styled(module, "forward")
        return placed + describe_computed(module)

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Replicate the parameters and let the module compute on its part."""
        problems = self.find_problems(module)
        if problems:
            raise UnsupportedModuleError(f"'{place.path}': {problems[0]}.")
        for part in module.modules():
            for name, _ in list(part.named_parameters(recurse=False)):
                place_parameter(
                    part, name, Replicate(), place.axis, place.src_data_rank
                )
            place_buffers(part, place.axis, place.src_data_rank)
        _compute_on_part(module, self._route(place))
        mark_styled(module, "forward", type(self).__name__)
        return module

    def _route(self, place: Place) -> Route:
        (layout,) = self.sequence_sharding
        return Route(
            axis=place.axis,
            style=type(self).__name__,
            path=place.path,
            given=layout,
            needed=layout,
            made=layout,
            wanted=layout,
            local_output=self.use_local_output,
        )


def _compute_on_part(module: nn.Module, route: Route) -> None:
    local = _LOCAL_FORMS.get(type(module))
    if local is None or "forward" in vars(module):
        run_on_dtensors(module, route)
        return
    module.__class__ = local
    module.route = route  # type: ignore[assignment]
