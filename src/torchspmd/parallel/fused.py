"""Column-wise for layers whose output is several parts: fused QKV, gate and up; GQA."""

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from torchspmd import _torch
from torchspmd.errors import LayoutError
from torchspmd.layout.placements import PARTIAL, shard
from torchspmd.parallel.joined import mark_copy
from torchspmd.parallel.linear import ColwiseParallel, linear_form, local_form
from torchspmd.parallel.parameters import (
    describe_computed,
    local_shard,
    unwrapped_parameters,
)
from torchspmd.parallel.parts import (
    Part,
    SplitParameter,
    join_parts,
    join_with_gradient,
    part_parameters,
)
from torchspmd.parallel.redistribute import change_layout, wrap
from torchspmd.parallel.route import Route, build_route, check_tensor, enter_features
from torchspmd.parallel.style import (
    Cut,
    Place,
    PlacedStyle,
    Slab,
    StyleLayouts,
    describe_placed,
    one_layout,
)

NAMES = ("weight", "bias")


class FusedOutput:
    """The output of a fused layer, for a forward that splits it by the sizes of one device.

    ``split``, ``chunk`` and ``tensor_split`` of the last dimension, as methods and as
    functions of torch, give this rank's share of each part. Anything else would compute
    with parts of other heads, and is an error.
    """

    def __init__(self, parts: Sequence[torch.Tensor], whole: Sequence[int]) -> None:
        self.parts, self._whole = tuple(parts), tuple(whole)

    @property
    def shape(self) -> torch.Size:
        """The shape that the output has on one device."""
        return torch.Size((*self.parts[0].shape[:-1], sum(self._whole)))

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return self.parts[0].ndim

    @property
    def dtype(self) -> torch.dtype:
        """The element type."""
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        """The device."""
        return self.parts[0].device

    def size(self, dim: int | None = None) -> Any:
        """The shape that the output has on one device, or one size of it."""
        return self.shape if dim is None else self.shape[dim]

    def split(self, split_size: int | Sequence[int], dim: int = 0) -> Any:
        """The parts; the sizes are those of one device."""
        total = sum(self._whole)
        if isinstance(split_size, int):
            full, rest = divmod(total, split_size)
            split_size = [split_size] * full + [rest] * bool(rest)
        return self._split(list(split_size), dim, f"split by {split_size}")

    def chunk(self, chunks: int, dim: int = 0) -> Any:
        """The parts, as many as ``chunks``."""
        return self.split(-(-sum(self._whole) // chunks), dim)

    def tensor_split(self, indices_or_sections: Any, dim: int = 0) -> Any:
        """The parts, for these indices or this many sections."""
        total = sum(self._whole)
        given = indices_or_sections
        if isinstance(given, int):
            given = [i * -(-total // given) for i in range(1, given)]
        places = [0, *given, total]
        sizes = [end - start for start, end in itertools.pairwise(places)]
        return self._split(sizes, dim, f"tensor_split by {sizes}")

    def _split(self, sizes: list[int], dim: int, what: str) -> tuple[torch.Tensor, ...]:
        if sizes == list(self._whole) and dim in (-1, self.ndim - 1):
            return self.parts
        raise LayoutError(
            f"FusedColwiseParallel: {what} in dimension {dim} of an output that is "
            f"{list(self.shape)} on one device. Its parts are {list(self._whole)} of the "
            "last dimension; write the parts of the style as the forward splits."
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """``torch.split``, ``chunk`` and ``tensor_split``, as the methods do them."""
        name = getattr(func, "__name__", str(func))
        if name in ("split", "chunk", "tensor_split") and isinstance(args[0], cls):
            return getattr(args[0], name)(*args[1:], **(kwargs or {}))
        raise LayoutError(_not_split(name))

    def __getattr__(self, name: str) -> Any:
        raise LayoutError(_not_split(name)) if name[:1] != "_" else AttributeError(name)


def _not_split(name: str) -> str:
    return (
        f"FusedColwiseParallel: {name} of the output of a fused layer before it was split. "
        "With split_whole=True it is split first (split, chunk, tensor_split in the last "
        "dimension); without, it is one plain tensor of this rank's features."
    )


class LocalFusedLinear(nn.Linear):
    """A Linear that computes this rank's share of each of its parts.

    ``parallelize_module`` turns an ``nn.Linear`` into one; it is not built by hand.
    """

    route: Route
    parts: tuple[Part, ...]
    split_whole: bool
    split_parameters: "Mapping[str, SplitParameter]"

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """This rank's features of every part, side by side."""
        route = self.route
        check_tensor(input, route)
        steps = route.steps(input.ndim, input.ndim)
        value = enter_features(input, route, steps, self.in_features)
        whole = change_layout(
            value.tensor,
            value.layout,
            steps.desired_input,
            route.axis,
            value.shape,
            gradient=PARTIAL,
            leaving=value.gradient,
        )
        weight, bias = (self._local(name) for name in NAMES)
        assert weight is not None
        output = F.linear(
            whole, weight.t() if self.split_parameters["weight"].dim else weight, bias
        )
        if not self.split_whole:
            return output
        return self._split_output(output, value.shape)  # type: ignore[return-value]

    def _split_output(
        self, output: torch.Tensor, shape: tuple[int, ...]
    ) -> FusedOutput:
        axis = self.route.axis
        sizes = [part.local_size(axis.size, axis.rank) for part in self.parts]
        shares: Sequence[torch.Tensor] = output.split(sizes, -1)
        if not self.route.local_output:
            layout = shard(output.ndim - 1)
            shares = [
                wrap(share, layout, axis, (*shape[:-1], part.size))
                for share, part in zip(shares, self.parts, strict=True)
            ]
        return FusedOutput(shares, [part.size for part in self.parts])

    def _local(self, name: str) -> torch.Tensor | None:
        """This rank's features of a parameter, part after part."""
        given = part_parameters(self, name)
        if not given:
            return None
        axis, dim = self.route.axis, self.split_parameters[name].dim
        shards = []
        for part, parameter in zip(self.parts, given, strict=True):
            if part.is_shared(axis.size):
                shard = local_shard(parameter, sum_over=axis)
                shards.append(shard.narrow(dim, *part.shared_head(axis)))
            else:
                shards.append(local_shard(parameter))
        return shards[0] if len(shards) == 1 else torch.cat(shards, dim)

    def reset_parameters(self) -> None:
        """Draw values as one device does; those of the first rank go to all."""
        given = part_parameters(self, "weight")[0]
        whole = nn.Linear(
            self.in_features,
            self.out_features,
            bias=bool(part_parameters(self, "bias")),
            device=given.device,
            dtype=given.dtype,
        ).requires_grad_(False)
        for name, drawn in whole.named_parameters():
            value = drawn.t() if self.split_parameters[name].dim else drawn
            parts = self.split_parameters[name].split(value, self, src_data_rank=0)
            held = part_parameters(self, name)
            with torch.no_grad():
                for parameter, part in zip(held, parts, strict=True):
                    parameter.copy_(part)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The whole weight in the order of one device, sharded by rows. It communicates.

        It is a copy to read: a loss may be computed with it, but writing into it,
        freezing it or asking for its gradient is an error. The parameters are those in
        ``weight_parts``.
        """
        joined = self._joined("weight")
        assert joined is not None
        return joined

    @property
    def bias(self) -> torch.Tensor | None:  # type: ignore[override]
        """The whole bias, as a copy like ``weight``. It communicates."""
        return self._joined("bias")

    def _joined(self, name: str) -> torch.Tensor | None:
        held: Any = getattr(self, f"{name}_parts")
        if held is None:
            return None
        opened = dict(unwrapped_parameters(held))
        given = [opened.get(str(i), part) for i, part in enumerate(held)]
        axis, dim = self.route.axis, self.split_parameters[name].dim
        if torch.is_grad_enabled() and any(part.requires_grad for part in given):
            joined = join_with_gradient(given, axis, dim)
        else:
            # Writing into this rank's shard of such a tensor is an error too.
            with torch.inference_mode():
                joined = join_parts(given, axis, dim)
        return mark_copy(joined, self.route.where, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the layer with its gradients; those of the parts are pieces of one tensor.

        Torch cannot deepcopy a DTensor whose shard starts inside a storage, so the pieces
        get memory of their own here, and not in each backward, where that would cost time.
        """
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update(copy.deepcopy(vars(self), memo))
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        """As in every module, but the joined parameters cannot be replaced."""
        if name in NAMES:
            raise LayoutError(
                f"{self.route.where}: its {name} cannot be set, as the layer computes "
                f"with {name}_parts, one parameter for each part. Write into these, or "
                f"load a whole {name} with load_state_dict."
            )
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """The layer's sizes, its parts and its style."""
        sizes = ", ".join(str(part.size) for part in self.parts)
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"parts=({sizes}), {self.route}"
        )


@dataclass(frozen=True, kw_only=True)
class FusedColwiseParallel(PlacedStyle):
    """Shard each part of a fused Linear by itself: QKV, or gate and up.

    ``ColwiseParallel`` would give rank 0 only queries. Here every rank gets its share of
    every part, side by side, as ``(..., sum of shares)``: split the output by the local
    sizes, or write ``split_whole=True`` for a forward that splits by the sizes of one
    device. The state dict has the layer's own keys with rows in the order of one device,
    so checkpoints load at any number of ranks, and into the model without styles.

    Args:
        parts: Size of each part, in order; they add up to the output features.
        num_heads: Number of heads of each part. A part with fewer heads than ranks
            (keys and values of grouped-query attention) is replicated, and neighbouring
            ranks use the same head.
        input_layouts: Layout of an input that is a plain tensor; default
            ``Replicate()``.
        split_whole: Return what can only be split (``split``, ``chunk``), by the sizes of
            one device, as GPT-2 does; else (the default) one tensor, to be split by this
            rank's sizes.
        use_local_output: Parts are this rank's tensors (the default), or DTensors of the
            whole sizes, for a forward that also reshapes by the sizes of one device, as
            nanoGPT does; with ``split_whole`` only.

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
    split_whole: bool = False
    use_local_output: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        heads = None if self.num_heads is None else tuple(self.num_heads)
        object.__setattr__(self, "num_heads", heads)
        given = one_layout(self, "input_layouts", self.input_layouts, Replicate())
        object.__setattr__(self, "input_layouts", given)
        problems = _argument_problems(self.parts, heads)
        if not self.split_whole and not self.use_local_output:
            problems.append("use_local_output=False needs split_whole=True")
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
        return _row_layouts(module)

    def parameter_cuts(self, module: nn.Module, num_ranks: int) -> dict[str, Cut]:
        """Each part by itself; whole where ranks share its heads."""
        return _row_cuts(module, self.split(), num_ranks)

    def layouts(self, module: nn.Module) -> StyleLayouts:
        """The input is needed whole; the output stays sharded."""
        return _fused_layouts(self.input_layouts, self.use_local_output)

    def find_problems(self, module: nn.Module) -> list[str]:
        """Only a plain Linear with that many output features."""
        name = type(self).__name__
        problems = describe_placed(module) + describe_computed(module)
        if problems:
            return problems
        form = linear_form(module)
        if form is None or local_form(module) is None:
            return [
                f"{name} only supports nn.Linear; this is a {type(module).__name__}"
            ]
        if sum(self.parts) != form.outside:
            problems.append(
                f"the parts {self.parts} add up to {sum(self.parts)}, the layer has "
                f"{form.outside} output features"
            )
        return problems

    def find_axis_problems(self, module: nn.Module, num_ranks: int) -> list[str]:
        """Heads that neither divide over the ranks nor are shared evenly by them."""
        return [
            text
            for i, part in enumerate(self.split())
            for text in _unshared_heads(i, part.num_heads, num_ranks)
        ]

    def place_fitting(self, module: nn.Module, place: Place) -> None:
        """Split the parameters into their parts and shard each."""
        form = linear_form(module)
        assert form is not None
        route = build_route(self, module, place)
        layouts = self.parameter_layouts(module)
        parts = self.split()
        for name in NAMES:
            layout = layouts.get(name, Shard(0))
            assert isinstance(layout, Shard)
            where = place.where(self)
            split = SplitParameter(name, parts, layout.dim, place.axis, where)
            split.place(module, place.src_data_rank)
        module.__class__ = LocalFusedLinear
        vars(module).update(
            route=route,
            parts=parts,
            split_whole=self.split_whole,
            in_features=form.inside,
            out_features=form.outside,
        )
        if not self.use_local_output:
            _torch.register_attention_on_cpu()


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

    Example:
        >>> from torchspmd.testing import fake_mesh
        >>> from torchspmd.parallel import parallelize_module
        >>> with fake_mesh(4, ("tp",)) as mesh:  # two heads of 8 features on four ranks
        ...     keys = nn.Linear(32, 16)
        ...     keys = parallelize_module(keys, mesh, KeyValueParallel(num_heads=2))
        ...     keys(torch.ones(3, 32)).shape
        torch.Size([3, 8])
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
        form = linear_form(module)
        if form is not None and form.outside % self.num_heads:
            return [
                f"{form.outside} output features do not divide into "
                f"{self.num_heads} heads"
            ]
        return self.fused(module).find_problems(module)

    def find_axis_problems(self, module: nn.Module, num_ranks: int) -> list[str]:
        """Heads that neither divide over the ranks nor are shared evenly by them."""
        return _unshared_heads(0, self.num_heads, num_ranks)

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Rows sharded, where there are at least as many heads as ranks."""
        return _row_layouts(module)

    def parameter_cuts(self, module: nn.Module, num_ranks: int) -> dict[str, Cut]:
        """One part, whole where ranks share its heads."""
        form = linear_form(module)
        size = 0 if form is None else form.outside
        part = Part(start=0, size=size, num_heads=self.num_heads)
        return _row_cuts(module, (part,), num_ranks)

    def layouts(self, module: nn.Module) -> StyleLayouts:
        """The input is needed whole; the output stays sharded."""
        return _fused_layouts(self.input_layouts)

    def place_fitting(self, module: nn.Module, place: Place) -> None:
        """Shard or replicate the projection."""
        self.fused(module).place_fitting(module, place)

    def fused(self, module: nn.Module) -> FusedColwiseParallel:
        """The same as a fused style with one part."""
        form = linear_form(module)
        size = self.num_heads if form is None else form.outside
        return FusedColwiseParallel(
            parts=(size,), num_heads=(self.num_heads,), input_layouts=self.input_layouts
        )


def _row_layouts(module: nn.Module) -> dict[str, Placement]:
    return ColwiseParallel().parameter_layouts(module)


def _row_cuts(
    module: nn.Module, parts: tuple[Part, ...], num_ranks: int
) -> dict[str, Cut]:
    return {
        name: tuple(Slab(p.size, p.layout(num_ranks, layout.dim)) for p in parts)
        for name, layout in _row_layouts(module).items()
        if isinstance(layout, Shard)
    }


def _fused_layouts(given: object, local_output: bool = True) -> StyleLayouts:
    assert isinstance(given, tuple)
    return StyleLayouts(given, (Replicate(),), Shard(-1), Shard(-1), local_output)


def _unshared_heads(index: int, num_heads: int, num_ranks: int) -> list[str]:
    if not num_heads or num_heads % num_ranks == 0 or num_ranks % num_heads == 0:
        return []
    return [
        f"part {index} has {num_heads} heads for {num_ranks} ranks; one number must "
        "divide the other"
    ]


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
