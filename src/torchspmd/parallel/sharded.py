"""How Colwise and Rowwise put a Linear or an Embedding on its shards."""

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Placement

from torchspmd.errors import UnsupportedModuleError
from torchspmd.parallel.computed import describe_computed
from torchspmd.parallel.dispatch import run_on_dtensors
from torchspmd.parallel.embedding import LocalEmbedding
from torchspmd.parallel.linear import LocalLinear
from torchspmd.parallel.parameters import place_parameter
from torchspmd.parallel.route import Route
from torchspmd.parallel.style import Place, PlacedStyle, describe_placed


@dataclass(frozen=True, kw_only=True)
class ShardedStyle(PlacedStyle):
    """What Colwise and Rowwise have in common."""

    input_layouts: Placement | tuple[Placement] | None = None
    output_layouts: Placement | tuple[Placement] | None = None
    use_local_output: bool = True


def sharded_problems(style: ShardedStyle, module: nn.Module) -> list[str]:
    """Why a Colwise or Rowwise style does not fit a module."""
    if not isinstance(module, (nn.Linear, nn.Embedding)):
        name = type(style).__name__
        text = (
            f"{name} currently only support nn.Linear and nn.Embedding! This is a "
            f"{type(module).__name__}; write the pattern of the layer inside of it"
        )
        return [text]
    return describe_placed(module) + describe_computed(module)


def place_sharded(
    style: ShardedStyle,
    module: nn.Module,
    place: Place,
    *,
    needed: Placement,
    made: Placement,
) -> nn.Module:
    """Replace the parameters by shards, and the forward by one that computes on them."""
    problems = style.find_problems(module)
    if problems:
        where = f"'{place.path}': " if place.path else ""
        raise UnsupportedModuleError(f"{where}{problems[0]}.")
    for name, placement in style.parameter_layouts(module).items():
        place_parameter(module, name, placement, place.axis, place.src_data_rank)
    assert isinstance(style.input_layouts, tuple)
    assert isinstance(style.output_layouts, tuple)
    route = Route(
        axis=place.axis,
        style=type(style).__name__,
        path=place.path,
        given=style.input_layouts[0],
        needed=needed,
        made=made,
        wanted=style.output_layouts[0],
        local_output=style.use_local_output,
    )
    _compute_on_shards(module, route)
    return module


def _compute_on_shards(module: nn.Module, route: Route) -> None:
    local = local_form(module)
    if local is None:
        run_on_dtensors(module, route)
        return
    # The object stays the one that the model holds; only its forward is another.
    module.__class__ = local
    module.route = route  # type: ignore[assignment]


def local_form(module: nn.Module) -> type[nn.Module] | None:
    """The class that computes this module on shards; None where DTensor must.

    A subclass or a replaced ``forward`` may do anything, so only the plain classes have
    a local form.
    """
    if "forward" in vars(module):
        return None
    if type(module) is nn.Linear:
        return LocalLinear
    plain = isinstance(module, nn.Embedding) and not (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    )
    return LocalEmbedding if plain and type(module) is nn.Embedding else None
