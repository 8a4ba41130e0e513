"""How Colwise and Rowwise put a Linear or an Embedding on its shards."""

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchspmd.errors import UnsupportedModuleError
from torchspmd.parallel.dispatch import run_on_dtensors
from torchspmd.parallel.linear import LocalEmbedding, LocalLinear
from torchspmd.parallel.parameters import describe_computed, place_parameter
from torchspmd.parallel.route import Route
from torchspmd.parallel.style import Place, PlacedStyle, describe_placed, one_layout


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


# ----------------------------------------------------------------------------
# Column-wise: every rank holds some output features of a layer.


@dataclass(frozen=True, kw_only=True)
class ColwiseParallel(ShardedStyle):
    """Shard a Linear or an Embedding over its output features.

    The input is needed whole; each rank computes its part of the last dimension of the
    output. Forward sends nothing when the input is replicated and the output stays
    sharded; backward sums the input's gradient.

    Args:
        input_layouts: Layout of an input that is a plain tensor; default
            ``Replicate()``.
        output_layouts: Layout of the output; default ``Shard(-1)``.
        use_local_output: Return this rank's tensor (the default), or a DTensor.

    Example:
        >>> import torch
        >>> from torchspmd.testing import fake_mesh
        >>> from torchspmd.parallel import parallelize_module
        >>> with fake_mesh(4, ("tp",)) as mesh:
        ...     linear = parallelize_module(nn.Linear(8, 16), mesh, ColwiseParallel())
        ...     linear(torch.ones(2, 8)).shape
        torch.Size([2, 4])
    """

    def __post_init__(self) -> None:
        given = one_layout(self, "input_layouts", self.input_layouts, Replicate())
        wanted = one_layout(self, "output_layouts", self.output_layouts, Shard(-1))
        object.__setattr__(self, "input_layouts", given)
        object.__setattr__(self, "output_layouts", wanted)

    @property
    def desired_input_layouts(self) -> tuple[Placement]:
        """The layout that the computation reads."""
        return (Replicate(),)

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Output features sharded: rows of a Linear's weight, columns of a table."""
        dim = 1 if isinstance(module, nn.Embedding) else 0
        names = (name for name, _ in module.named_parameters(recurse=False))
        return dict.fromkeys(names, Shard(dim))

    def find_problems(self, module: nn.Module) -> list[str]:
        """Only Linear and Embedding have columns, and only once."""
        return sharded_problems(self, module)

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Shard the parameters and let the module compute on its shard."""
        return place_sharded(self, module, place, needed=Replicate(), made=Shard(-1))


# ----------------------------------------------------------------------------
# Row-wise: every rank holds some input features of a layer, and its sums are added.


@dataclass(frozen=True, kw_only=True)
class RowwiseParallel(ShardedStyle):
    """Shard a Linear over its input features, or an Embedding over its rows.

    Each rank computes a term of the output; the terms are summed into the output's
    layout, by one all-reduce (``Replicate()``) or reduce-scatter (``Shard(dim)``). A
    bias is added once, after the sum.

    Args:
        input_layouts: Layout of an input that is a plain tensor; default ``Shard(-1)``.
            The indices of an Embedding are usually ``Replicate()``.
        output_layouts: Layout of the output; default ``Replicate()``.
        use_local_output: Return this rank's tensor (the default), or a DTensor.

    Example:
        >>> import torch
        >>> from torchspmd.testing import fake_mesh
        >>> from torchspmd.parallel import parallelize_module
        >>> with fake_mesh(4, ("tp",)) as mesh:
        ...     linear = parallelize_module(nn.Linear(8, 16), mesh, RowwiseParallel())
        ...     linear(torch.ones(2, 2)).shape
        torch.Size([2, 16])
    """

    def __post_init__(self) -> None:
        given = one_layout(self, "input_layouts", self.input_layouts, Shard(-1))
        wanted = one_layout(self, "output_layouts", self.output_layouts, Replicate())
        object.__setattr__(self, "input_layouts", given)
        object.__setattr__(self, "output_layouts", wanted)

    def desired_input_layouts(self, module: nn.Module) -> tuple[Placement]:
        """The layout that the computation of this module reads."""
        return (Replicate(),) if isinstance(module, nn.Embedding) else (Shard(-1),)

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Input features sharded: columns of a Linear's weight, rows of a table."""
        if isinstance(module, nn.Embedding):
            return {"weight": Shard(0)}
        names = [name for name, _ in module.named_parameters(recurse=False)]
        return {n: Replicate() if n == "bias" else Shard(1) for n in names}

    def find_problems(self, module: nn.Module) -> list[str]:
        """Only Linear and Embedding have rows, and only once."""
        return sharded_problems(self, module)

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Shard the parameters and let the module compute on its shard."""
        (needed,) = self.desired_input_layouts(module)
        return place_sharded(self, module, place, needed=needed, made=Partial())
