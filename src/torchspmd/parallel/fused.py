"""Column-wise for layers whose output is several parts: fused QKV, gate and up; GQA."""

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from torchspmd import _torch
from torchspmd.errors import LayoutError
from torchspmd.layout.retired import copy_attributes
from torchspmd.layout.shards import shard_size
from torchspmd.parallel.axis import Axis
from torchspmd.parallel.linear import ColwiseParallel, linear_form, local_form
from torchspmd.parallel.parameters import (
    describe_computed,
    local_shard,
    remember_layout,
    unwrapped_parameters,
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

# ----------------------------------------------------------------------------
# The joined weight of a fused layer: a copy to read, which says so when it is written.
#
# The layer's parameters are its parts. Code that writes into ``layer.weight``, freezes it
# or asks for its gradient means the parts, and would change a temporary copy instead.

_Tensor: Any = torch.Tensor  # its attributes as descriptors

# Uses that only a parameter allows, and a copy does not; ``data`` may be read.
_WRITES = {
    _Tensor.data.__set__: "setting .data",
    _Tensor.grad.__get__: "reading .grad",
    _Tensor.grad.__set__: "setting .grad",
    _Tensor.requires_grad.__set__: "setting .requires_grad",
    _Tensor.__setitem__: "setting items",
    _Tensor.register_hook: "register_hook",
    _Tensor.register_post_accumulate_grad_hook: "register_post_accumulate_grad_hook",
}
# Views of a copy: a write into one is meant for the layer as well. They are known by name,
# as DTensor may have copied the memory.
_VIEW_NAMES = frozenset(
    "chunk detach flatten narrow permute reshape select split squeeze t tensor_split "
    "transpose unbind unflatten unsqueeze view view_as __getitem__".split()
)
_VIEW_ATTRIBUTES = (_Tensor.data.__get__, _Tensor.T.__get__)


class _Copy(torch.Tensor):
    """A tensor that refuses to be written, and knows whose copy it is."""

    __slots__ = ()  # the same layout in memory as the class that it takes over
    layer: str  # how errors name it
    parameter: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run calls that only read; others are an error that names the parameters."""
        kwargs = kwargs or {}
        write = _describe_write(func, "out" in kwargs)
        written = _written(args, kwargs) if write else None
        if write and written is not None:
            raise _lost(written, write)
        # DTensor's own method returns results of their usual class, for plain tensors too.
        result = DTensor.__torch_function__(func, types, args, kwargs)
        source = args[0] if args else None
        if isinstance(source, _Copy) and _is_view(func):
            for part in result if isinstance(result, (list, tuple)) else [result]:
                mark_copy(part, source.layer, source.parameter)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)


class JoinedShard(_Copy):
    """This rank's shard of a joined copy, in the same memory."""

    __slots__ = ()


class JoinedCopy(_Copy, DTensor):
    """The DTensor that is joined from the parts."""

    __slots__ = ()

    def to_local(self, **options: Any) -> torch.Tensor:
        """This rank's shard; it may only be read, too."""
        shard = super().to_local(**options)
        # Torch itself refuses writes into tensors of inference mode.
        if shard.is_inference():
            return shard
        return mark_copy(shard, self.layer, self.parameter)


def _describe_write(func: Callable[..., Any], has_out: bool) -> str | None:
    """What a call does to its first argument; None where it only reads."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return name if has_out or in_place else _WRITES.get(func)


def _is_view(func: Callable[..., Any]) -> bool:
    return getattr(func, "__name__", "") in _VIEW_NAMES or func in _VIEW_ATTRIBUTES


def _written(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Copy | None:
    """The copy that a writing call writes into; None where it writes elsewhere."""
    target = kwargs.get("out", next(iter((*args, *kwargs.values())), None))
    several = target if isinstance(target, (list, tuple)) else [target]
    return next((value for value in several if isinstance(value, _Copy)), None)


def _lost(copy: _Copy, write: str) -> LayoutError:
    name, parts = copy.parameter, f"{copy.parameter}_parts"
    return LayoutError(
        f"{copy.layer}: its {name} is a copy that is joined for reading, and "
        f"{write} would not reach the layer. Its parameters are those in {parts}, "
        f"one for each part: use them (`for p in layer.{parts}`), or load a whole "
        f"{name} with load_state_dict."
    )


def mark_copy(joined: Any, layer: str, name: str) -> torch.Tensor:
    """The same tensor, as a copy of what that layer calls ``name``."""
    joined.__class__ = JoinedCopy if isinstance(joined, DTensor) else JoinedShard
    joined.layer, joined.parameter = layer, name
    return joined


# ----------------------------------------------------------------------------
# A Linear whose output features are several parts side by side, each sharded by itself.
#
# The parts are DTensor parameters of their own, so that optimizers, checkpoints and other
# mesh sizes see true layouts; the state dict joins them under the layer's own key.

NAMES = ("weight", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some consecutive output features of a layer.

    Attributes:
        start: The first of them.
        size: How many.
        num_heads: How many heads they are; 0 where heads do not matter.
    """

    start: int
    size: int
    num_heads: int = 0

    def is_shared(self, num_ranks: int) -> bool:
        """Whether there are fewer heads than ranks, so that ranks share a head."""
        return 0 < self.num_heads < num_ranks

    def layout(self, num_ranks: int, dim: int = 0) -> Placement:
        """How a parameter of the part lies on the axis, its features in a dimension."""
        return Replicate() if self.is_shared(num_ranks) else Shard(dim)

    def local_size(self, num_ranks: int, rank: int) -> int:
        """How many features of the part one rank computes."""
        if self.is_shared(num_ranks):
            return self.size // self.num_heads
        return shard_size(self.size, num_ranks, rank)

    def shared_head(self, axis: Axis) -> tuple[int, int]:
        """First feature and number of features of the head that this rank uses."""
        size = self.size // self.num_heads
        return size * (axis.rank * self.num_heads // axis.size), size


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
            gradient=Partial(),
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
            layout = Shard(output.ndim - 1)
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
            joined = _join_with_gradient(given, axis, dim)
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


def part_parameters(module: nn.Module, name: str) -> list[torch.Tensor]:
    """The parameters that hold the parts of ``weight`` or ``bias``."""
    found = getattr(module, f"{name}_parts", None)
    return [] if found is None else list(found)


def join_parts(parts: list[torch.Tensor], axis: Axis, dim: int = 0) -> torch.Tensor:
    """The parts as one DTensor in the order of one device, its features sharded.

    Every part is gathered for a moment; each rank keeps only its share of the whole.
    """
    with torch.no_grad():
        whole = _whole(parts, dim)
        return distribute_tensor(whole, axis.mesh, (Shard(dim),), src_data_rank=None)


def _join_with_gradient(
    parts: list[torch.Tensor], axis: Axis, dim: int
) -> torch.Tensor:
    """The same as ``join_parts``; what is computed with it trains the parts."""
    whole = _whole(parts, dim)
    same = DTensor.from_local(whole, axis.mesh, (Replicate(),), run_check=False)
    return same.redistribute(placements=(Shard(dim),))


def _whole(parts: list[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(
        [p.full_tensor() if isinstance(p, DTensor) else p for p in parts], dim
    )


@dataclass(frozen=True, slots=True)
class SplitParameter:
    """A parameter that a module holds as several, each sharded by itself.

    A state dict has the whole one, under its name.

    Attributes:
        name: The parameter's name in its module.
        parts: The parts, of the features in one dimension.
        dim: That dimension.
        axis: Where the parts lie.
        where: How errors name the module.
    """

    name: str
    parts: tuple[Part, ...]
    dim: int
    axis: Axis
    where: str

    def split(
        self, value: torch.Tensor, module: nn.Module, src_data_rank: int | None = None
    ) -> list[torch.Tensor]:
        """A whole parameter, plain or a DTensor, laid out like the parts that hold it."""
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        expected = sum(part.size for part in self.parts)
        if whole.size(self.dim) != expected:
            raise LayoutError(
                f"{self.where}: the saved {self.name} has {whole.size(self.dim)} "
                f"{'columns' if self.dim else 'rows'}, the layer has {expected} output "
                "features."
            )
        held = part_parameters(module, self.name)
        return [
            # A copy: DTensors around views of a larger storage do not pickle.
            _like(
                whole.narrow(self.dim, part.start, part.size).clone(),
                parameter,
                src_data_rank,
            )
            for part, parameter in zip(self.parts, held, strict=True)
        ]

    def save(self, state: dict[str, Any], prefix: str) -> None:
        """One key of a state dict for all parts."""
        keys = [f"{prefix}{self.name}_parts.{i}" for i in range(len(self.parts))]
        if all(key in state for key in keys):
            parts = [state.pop(key) for key in keys]
            state[f"{prefix}{self.name}"] = join_parts(parts, self.axis, self.dim)

    def load(self, module: nn.Module, state: dict[str, Any], prefix: str) -> None:
        """Keys for the parts instead of that of the whole parameter."""
        value = state.pop(f"{prefix}{self.name}", None)
        if value is not None:
            for i, part in enumerate(self.split(value, module)):
                state[f"{prefix}{self.name}_parts.{i}"] = part

    def place(self, module: nn.Module, src_data_rank: int | None) -> None:
        """Replace the parameter by a list of DTensors, one for each part."""
        known = vars(module).setdefault(_SPLIT, {})
        if not known:
            module.register_state_dict_post_hook(save_joined)
            module.register_load_state_dict_pre_hook(load_split)
        known[self.name] = self
        parameter = getattr(module, self.name)
        delattr(module, self.name)
        if parameter is None:
            module.register_module(f"{self.name}_parts", None)
            return
        placed = [
            nn.Parameter(
                distribute_tensor(
                    # A copy: DTensors around views of a larger storage do not pickle.
                    parameter.detach().narrow(self.dim, part.start, part.size).clone(),
                    self.axis.mesh,
                    (part.layout(self.axis.size, self.dim),),
                    src_data_rank=src_data_rank,
                ),
                requires_grad=parameter.requires_grad,
            )
            for part in self.parts
        ]
        held = nn.ParameterList(placed)
        for i, part in enumerate(held):
            copy_attributes(parameter, part)
            remember_layout(held, str(i), part)
        module.register_module(f"{self.name}_parts", held)


_SPLIT = "split_parameters"  # on a module: those that it holds in parts, by name


def save_joined(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """State-dict hook: one key for each parameter, as before it was split."""
    for split in getattr(module, _SPLIT).values():
        split.save(state, prefix)


def load_split(
    module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any
) -> None:
    """Load hook: the key of a whole parameter becomes those of its parts."""
    for split in getattr(module, _SPLIT).values():
        split.load(module, state, prefix)


def _like(
    value: torch.Tensor, parameter: torch.Tensor, src_data_rank: int | None
) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return value
    # Other styles of parallelism may have added axes to the parameter's mesh.
    mesh, layout = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, layout, src_data_rank=src_data_rank)


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
    text = (
        f"part {index} has {num_heads} heads for {num_ranks} ranks; one number must "
        "divide the other"
    )
    return [text]


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
