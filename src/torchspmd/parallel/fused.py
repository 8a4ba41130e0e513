"""Column-wise for layers whose output is several parts: fused QKV, gate and up; GQA."""

from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from torchspmd.errors import LayoutError, UnsupportedModuleError
from torchspmd.parallel.axis import Axis
from torchspmd.parallel.computed import describe_computed
from torchspmd.parallel.fused_linear import (
    NAMES,
    LocalFusedLinear,
    Part,
    load_split,
    save_joined,
)
from torchspmd.parallel.opened import remember_layout
from torchspmd.parallel.replaced import carry_attributes
from torchspmd.parallel.route import Route
from torchspmd.parallel.style import Place, PlacedStyle, describe_placed, one_layout


@dataclass(frozen=True, kw_only=True)
class FusedColwiseParallel(PlacedStyle):
    """Shard each part of a fused Linear by itself: QKV, or gate and up.

    ``ColwiseParallel`` would give rank 0 only queries. Here every rank gets its share of
    every part, side by side, as ``(..., sum of shares)``: split the output by the local
    sizes. The state dict has the layer's own keys with rows in the order of one device,
    so checkpoints load at any number of ranks, and into the model without styles.

    Args:
        parts: Size of each part, in order; they add up to the output features.
        num_heads: Number of heads of each part. A part with fewer heads than ranks
            (keys and values of grouped-query attention) is replicated, and neighbouring
            ranks use the same head.
        input_layouts: Layout of an input that is a plain tensor; default
            ``Replicate()``.

    Example:
        >>> import torch
        >>> from torchspmd.testing import fake_mesh
        >>> from torchspmd.parallel import parallelize_module
        >>> style = FusedColwiseParallel(parts=(16, 8, 8), num_heads=(4, 2, 2))
        >>> with fake_mesh(4, ("tp",)) as mesh:
        ...     qkv = parallelize_module(nn.Linear(16, 32), mesh, style)
        ...     qkv(torch.ones(2, 16)).shape  # one of four queries, one key, one value
        torch.Size([2, 12])
    """

    parts: tuple[int, ...]
    num_heads: tuple[int, ...] | None = None
    input_layouts: Placement | tuple[Placement] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        heads = None if self.num_heads is None else tuple(self.num_heads)
        object.__setattr__(self, "num_heads", heads)
        given = one_layout(self, "input_layouts", self.input_layouts, Replicate())
        object.__setattr__(self, "input_layouts", given)
        problems = _argument_problems(self.parts, heads)
        if problems:
            raise LayoutError(f"{type(self).__name__}: " + "; ".join(problems) + ".")

    def split(self) -> tuple[Part, ...]:
        """The parts with their first features."""
        heads = self.num_heads or (0,) * len(self.parts)
        starts = [sum(self.parts[:i]) for i in range(len(self.parts))]
        return tuple(
            Part(start=start, size=size, num_heads=count)
            for start, size, count in zip(starts, self.parts, heads, strict=True)
        )

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Rows sharded, part by part, where a part has as many heads as ranks."""
        names = (name for name, _ in module.named_parameters(recurse=False))
        return dict.fromkeys(names, Shard(0))

    def find_problems(self, module: nn.Module) -> list[str]:
        """Only a plain Linear with that many output features."""
        name = type(self).__name__
        problems = describe_placed(module) + describe_computed(module)
        if problems:
            return problems
        if type(module) is not nn.Linear or "forward" in vars(module):
            return [
                f"{name} only supports nn.Linear; this is a {type(module).__name__}"
            ]
        if sum(self.parts) != module.out_features:
            problems.append(
                f"the parts {self.parts} add up to {sum(self.parts)}, the layer has "
                f"{module.out_features} output features"
            )
        return problems

    def find_axis_problems(self, module: nn.Module, num_ranks: int) -> list[str]:
        """Heads that neither divide over the ranks nor are shared evenly by them."""
        return [
            text
            for i, part in enumerate(self.split())
            for text in _unshared_heads(i, part.num_heads, num_ranks)
        ]

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Split the parameters into their parts and shard each."""
        problems = self.find_problems(module)
        problems += self.find_axis_problems(module, place.axis.size)
        if problems:
            text = "; ".join(problems)
            raise UnsupportedModuleError(f"'{place.path}' on the {place.axis}: {text}.")
        assert isinstance(module, nn.Linear)
        parts = self.split()
        for name in NAMES:
            _split_parameter(module, name, parts, place.axis, place.src_data_rank)
        assert isinstance(self.input_layouts, tuple)
        module.__class__ = LocalFusedLinear
        module.parts = parts  # type: ignore[assignment]
        module.route = Route(  # type: ignore[assignment]
            axis=place.axis,
            style=type(self).__name__,
            path=place.path,
            given=self.input_layouts[0],
            needed=Replicate(),
            made=Shard(-1),
            wanted=Shard(-1),
            local_output=True,
        )
        module.register_state_dict_post_hook(save_joined)
        module.register_load_state_dict_pre_hook(load_split)
        return module


@dataclass(frozen=True, kw_only=True)
class KeyValueParallel(PlacedStyle):
    """Column-wise for a key or value projection that may have fewer heads than ranks.

    With at least as many heads as ranks it is ``ColwiseParallel``. With fewer, the
    parameters are replicated, each rank computes the one head that its queries need,
    and the parameters' gradients are summed over the ranks.

    Args:
        num_heads: Number of key-value heads of the projection.
        input_layouts: Layout of an input that is a plain tensor; default
            ``Replicate()``.
    """

    num_heads: int
    input_layouts: Placement | tuple[Placement] | None = None

    def __post_init__(self) -> None:
        given = one_layout(self, "input_layouts", self.input_layouts, Replicate())
        object.__setattr__(self, "input_layouts", given)
        if self.num_heads < 1:
            raise LayoutError(
                f"KeyValueParallel: num_heads is {self.num_heads}; pass the number of "
                "key-value heads of the model."
            )

    def find_problems(self, module: nn.Module) -> list[str]:
        """Only a plain Linear whose features divide into the heads."""
        if isinstance(module, nn.Linear) and module.out_features % self.num_heads:
            return [
                f"{module.out_features} output features do not divide into "
                f"{self.num_heads} heads"
            ]
        return self._fused(module).find_problems(module)

    def find_axis_problems(self, module: nn.Module, num_ranks: int) -> list[str]:
        """Heads that neither divide over the ranks nor are shared evenly by them."""
        return _unshared_heads(0, self.num_heads, num_ranks)

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Rows sharded, where there are at least as many heads as ranks."""
        names = (name for name, _ in module.named_parameters(recurse=False))
        return dict.fromkeys(names, Shard(0))

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Shard or replicate the projection."""
        return self._fused(module).place(module, place)

    def _fused(self, module: nn.Module) -> FusedColwiseParallel:
        size = module.out_features if isinstance(module, nn.Linear) else self.num_heads
        return FusedColwiseParallel(
            parts=(size,), num_heads=(self.num_heads,), input_layouts=self.input_layouts
        )


def _unshared_heads(index: int, num_heads: int, num_ranks: int) -> list[str]:
    if not num_heads or num_heads % num_ranks == 0 or num_ranks % num_heads == 0:
        return []
    text = (
        f"part {index} has {num_heads} heads for {num_ranks} ranks; one number must "
        "divide the other"
    )
    return [text]


def _split_parameter(
    module: nn.Linear,
    name: str,
    parts: tuple[Part, ...],
    axis: Axis,
    src_data_rank: int | None,
) -> None:
    """Replace a parameter by a list of DTensors, one for each part."""
    parameter = getattr(module, name)
    delattr(module, name)
    if parameter is None:
        module.register_module(f"{name}_parts", None)
        return
    placed = [
        nn.Parameter(
            distribute_tensor(
                # A copy: DTensors around views of a larger storage do not pickle.
                parameter.detach().narrow(0, part.start, part.size).clone(),
                axis.mesh,
                (part.layout(axis.size),),
                src_data_rank=src_data_rank,
            ),
            requires_grad=parameter.requires_grad,
        )
        for part in parts
    ]
    held = nn.ParameterList(placed)
    for i, part in enumerate(held):
        carry_attributes(parameter, part)
        remember_layout(held, str(i), part)
    module.register_module(f"{name}_parts", held)


def _argument_problems(
    parts: tuple[int, ...], num_heads: tuple[int, ...] | None
) -> list[str]:
    problems = []
    if not parts or any(size < 1 for size in parts):
        problems.append(f"parts is {parts}; pass the size of each part")
    if num_heads is None:
        return problems
    if len(num_heads) != len(parts):
        problems.append(
            f"num_heads has {len(num_heads)} numbers for {len(parts)} parts"
        )
    elif any(
        count < 1 or size % count for size, count in zip(parts, num_heads, strict=True)
    ):
        problems.append(f"the parts {parts} do not divide into {num_heads} heads")
    return problems
