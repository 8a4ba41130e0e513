"""One style for one module, and what can be known of a style before it is applied."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import ColwiseParallel as TorchColwise
from torch.distributed.tensor.parallel import RowwiseParallel as TorchRowwise
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequence
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from torchspmd import _torch
from torchspmd.errors import LayoutError
from torchspmd.layout.retired import describe_losses
from torchspmd.parallel.axis import Axis
from torchspmd.parallel.fused import FusedColwiseParallel, KeyValueParallel
from torchspmd.parallel.linear import ColwiseParallel, RowwiseParallel, ShardedStyle
from torchspmd.parallel.plan.plan import Style
from torchspmd.parallel.prepare import PrepareModuleInput, PrepareModuleInputOutput
from torchspmd.parallel.sequence import SequenceParallel
from torchspmd.parallel.style import ParallelStyle, Place, PlacedStyle

_OWN_ATTENTION = (
    "leave the attention without styles, or write it with four nn.Linear "
    "(ColwiseParallel for query, key and value, RowwiseParallel for the output) around "
    "scaled_dot_product_attention"
)
_CUTTING = (ShardedStyle, FusedColwiseParallel, KeyValueParallel, SequenceParallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One style for one module of a model, and the pattern that asked for it."""

    path: str
    module: nn.Module
    style: Style
    pattern: str

    def parameter_path(self, name: str) -> str:
        """The path in the model of one of the module's parameters."""
        return f"{self.path}.{name}" if self.path else name


def own_style(style: Style) -> ParallelStyle | None:
    """The style as one of ours; None for one of torch's that we cannot read."""
    if isinstance(style, ParallelStyle):
        return style
    if isinstance(style, (TorchColwise, TorchRowwise)):
        ours = ColwiseParallel if isinstance(style, TorchColwise) else RowwiseParallel
        return ours(
            input_layouts=style.input_layouts,
            output_layouts=style.output_layouts,
            use_local_output=style.use_local_output,
        )
    if isinstance(style, TorchSequence):
        (layout,) = style.sequence_sharding
        return SequenceParallel(
            sequence_dim=layout.dim, use_local_output=style.use_local_output
        )
    return None


def taken_layouts(
    style: ParallelStyle | None, module: nn.Module
) -> tuple[tuple[Placement | None, ...], Mapping[str, Placement]]:
    """The layouts in which a style takes plain inputs, by position and by name."""
    if isinstance(style, PrepareModuleInputOutput):
        style = style.prepare_module_input
    if isinstance(style, PrepareModuleInput):
        given = style.input_layouts
        by_name = style.input_kwarg_layouts or {}
        return (given if isinstance(given, tuple) else ()), by_name
    layouts = None if style is None else style.layouts(module)
    return (() if layouts is None else layouts.inputs), {}


def find_problems(style: Style, module: nn.Module, num_ranks: int) -> list[str]:
    """Why a style does not fit a module; empty when it does, or cannot be known."""
    own = own_style(style)
    if own is None:
        return []
    problems = own.find_problems(module)
    problems += _find_obstacles(own, module)
    # Sizes that do not fit the module need not be compared with the ranks.
    return problems or own.find_axis_problems(module, num_ranks)


def _find_obstacles(style: ParallelStyle, module: nn.Module) -> list[str]:
    """Why a style would do nothing here, or not all that the module is to keep."""
    if isinstance(module, nn.MultiheadAttention) and isinstance(style, _CUTTING):
        return [
            "an nn.MultiheadAttention computes with its parameters and calls no layers, "
            f"so that it cannot be cut; {_OWN_ATTENTION}"
        ]
    if isinstance(module, NonDynamicallyQuantizableLinear) and isinstance(
        style, PlacedStyle
    ):
        return [
            "it is the out_proj of an nn.MultiheadAttention, which reads its weight and "
            f"never calls it, so that no style can act; {_OWN_ATTENTION}"
        ]
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    if lazy:
        return [
            f"{', '.join(lazy)}: no shape yet, as in every lazy module before its first "
            "call; call the module once on a batch before parallelize_module"
        ]
    replaced = style.parameter_layouts(module)
    return describe_losses(
        {
            name: parameter
            for name, parameter in module.named_parameters()
            if name in replaced and not isinstance(parameter, DTensor)
        }
    )


def place(assignment: Assignment, axis: Axis, src_data_rank: int | None) -> None:
    """Put the style on the module."""
    style, module = assignment.style, assignment.module
    if isinstance(style, ParallelStyle):
        where = Place(axis=axis, path=assignment.path, src_data_rank=src_data_rank)
        placed = style.place(module, where)
    else:
        placed = _torch.apply_torch_style(style, module, axis.mesh, src_data_rank)
    if placed is not module:
        raise LayoutError(
            f"'{assignment.path}': {type(style).__name__} returned another module. A "
            "style changes the module that it is given and returns it."
        )


def parameter_layouts(assignment: Assignment) -> dict[str, Placement] | None:
    """The placement of each parameter by path; None when it cannot be known."""
    own = own_style(assignment.style)
    if own is None:
        return None
    layouts = own.parameter_layouts(assignment.module)
    return {assignment.parameter_path(name): p for name, p in layouts.items()}
