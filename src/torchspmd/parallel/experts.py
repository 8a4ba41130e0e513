"""Experts of a mixture whose weights are stacked, and modules that stay whole."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchspmd import _torch
from torchspmd.errors import LayoutCountError, LayoutError
from torchspmd.layout.placements import PARTIAL, positive_dim
from torchspmd.parallel.axis import check_even, global_shape
from torchspmd.parallel.parameters import (
    describe_computed,
    describe_hooked,
    local_shards,
    place_parameter,
    wrong_shard,
)
from torchspmd.parallel.parts import Part, SplitParameter
from torchspmd.parallel.redistribute import arriving, change_layout, unwrap, wrap
from torchspmd.parallel.style import (
    Cut,
    Layouts,
    Place,
    PlacedStyle,
    Slab,
    StyleLayouts,
    check_layouts,
    describe_placed,
    describe_styled,
    many_layouts,
    mark_styled,
    one_layout,
)

# ----------------------------------------------------------------------------
# Run any module's own forward on this rank's shards of its parameters.
#
# For modules of types that torchspmd does not know, where the style says in which layouts
# that is right: stacked experts, adapters, routers.


class LocalForward:
    """Replaces the ``forward`` of one module object.

    Where the style makes ``Partial()``, every rank computes another partial value; where
    it makes ``Replicate()``, every rank computes the same.
    """

    def __init__(
        self,
        style: PlacedStyle,
        module: nn.Module,
        place: Place,
        packed: Mapping[str, SplitParameter] | None = None,
    ) -> None:
        layouts = style.layouts(module)
        assert layouts is not None
        self._packed = packed or {}
        self._shell = _Shell(module)
        self._layouts = layouts
        self._axis, self._where = place.axis, place.where(style)
        placed = {
            name: parameter
            for name, parameter in self._shell.named_parameters()
            if isinstance(parameter, DTensor)
        }
        self._shapes = {
            n: tuple(_torch.local_tensor(p).shape) for n, p in placed.items()
        }
        self._whole = {
            n for n, p in placed.items() if all(x.is_replicate() for x in p.placements)
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare the inputs, run the module's forward on shards, lay out the output."""
        num_inputs = len(self._layouts.inputs)
        if len(args) != num_inputs:
            raise LayoutError(
                f"{self._where}: module inputs and input_layouts should have same length! "
                f"It got {len(args)} positional inputs for {num_inputs} layouts; "
                "write None for an input to leave alone."
            )
        self._check_keywords(kwargs)
        inputs = tuple(self._enter(i, value) for i, value in enumerate(args))
        output = torch.func.functional_call(self._shell, self._shards(), inputs, kwargs)
        if not isinstance(output, torch.Tensor) or isinstance(output, DTensor):
            raise LayoutError(
                f"{self._where}: the module returned a {type(output).__name__}; it must "
                "return one plain tensor."
            )
        return self._leave(output)

    def _shards(self) -> dict[str, torch.Tensor]:
        """This rank's shard of each parameter, by its name in the shell."""
        found = self._local_parameters()
        for name, split in self._packed.items():
            keys = [f"module.{name}_parts.{i}" for i in range(len(split.parts))]
            parts = [found.pop(key) for key in keys]
            found[f"module.{name}"] = torch.cat(parts, split.dim)
        return found

    def _local_parameters(self) -> dict[str, torch.Tensor]:
        parameters = self._parameters()
        # Where every rank computes a partial value, a whole parameter's gradient is one.
        summed = [
            name
            for name in parameters
            if type(self._layouts.computed) is Partial and name in self._whole
        ]
        others = [name for name in parameters if name not in summed]
        found: dict[str, torch.Tensor] = {}
        for names, total in ((summed, self._axis), (others, None)):
            shards = local_shards([parameters[name] for name in names], total)
            pairs = zip(names, shards, strict=True)
            found |= {name: shard for name, shard in pairs if shard is not None}
        self._check_shards(found)
        return found

    def _parameters(self) -> dict[str, torch.Tensor]:
        """The parameters, also those that DistributedDataParallel keeps for itself.

        While it has the module, its DTensors are plain attributes.
        """
        found: dict[str, torch.Tensor] = dict(self._shell.named_parameters())
        for name in [name for name in self._shapes if name not in found]:
            owner, _, last = name.rpartition(".")
            value = getattr(self._shell.get_submodule(owner), last, None)
            if isinstance(value, DTensor):
                found[name] = value
        return found

    def _check_shards(self, shards: dict[str, torch.Tensor]) -> None:
        for name, shard in shards.items():
            expected = self._shapes.get(name)
            if expected is not None and shard.shape != expected:
                inside = name.removeprefix("module.")
                raise wrong_shard(self._where, inside, shard, expected)

    def _check_keywords(self, keywords: dict[str, Any]) -> None:
        if type(self._layouts.computed) is not Partial or not torch.is_grad_enabled():
            return
        names = [
            name
            for name, value in keywords.items()
            if isinstance(value, torch.Tensor) and value.requires_grad
        ]
        if names:
            raise LayoutError(
                f"{self._where}: the keyword inputs {', '.join(names)} require a "
                "gradient, which would be only this rank's part of the sum. Pass them by "
                "position, with a layout for each in input_layouts."
            )

    def _enter(self, index: int, value: Any) -> Any:
        layouts, axis = self._layouts, self._axis
        given, needed = layouts.inputs[index], layouts.desired_inputs[index]
        if given is None or needed is None:
            return value
        if not isinstance(value, torch.Tensor):
            raise LayoutError(
                f"{self._where}: input {index} is a {type(value).__name__}; write None as "
                "its layout to leave it alone."
            )
        target = positive_dim(needed, value.ndim)
        # What every rank reads whole for a partial value has a partial gradient.
        is_partial = type(target) is Replicate and type(layouts.computed) is Partial
        gradient = PARTIAL if is_partial and value.requires_grad else None
        value, source, shape = arriving(value, given, axis, self._where)
        if isinstance(value, DTensor):
            value = unwrap(value, axis)
        return change_layout(value, source, target, axis, shape, gradient=gradient)

    def _leave(self, output: torch.Tensor) -> torch.Tensor:
        layouts, axis = self._layouts, self._axis
        made = positive_dim(layouts.computed, output.ndim)
        wanted = positive_dim(layouts.output, output.ndim)
        shape = global_shape(tuple(output.shape), made, axis.size)
        if layouts.local_output:
            check_even(shape, wanted, axis, self._where)
        output = change_layout(output, made, wanted, axis, shape)
        return output if layouts.local_output else wrap(output, wanted, axis, shape)


class _Shell(nn.Module):
    """Holds a module to swap its parameters, and runs the forward of its class."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


@dataclass(frozen=True, kw_only=True)
class ExpertParallel(PlacedStyle):
    """Shard stacked expert weights; every rank computes those of its own experts.

    The module's own forward runs on plain tensors: its parameters are this rank's
    shards, its inputs are in ``desired_input_layouts``, and what it returns is a
    partial value, summed over the ranks. That is right for experts whose outputs are
    added: a dense router's weights ``(tokens, experts)`` are cut to this rank's experts
    with ``Shard(-1)``. Sharding a hidden dimension of the experts (``{"up": Shard(2),
    "down": Shard(1)}``) is right as well, also where a parameter is several matrices side
    by side in that dimension (``packed={"gate_up_proj": 2}``). The gradients of replicated
    parameters are summed over the ranks, in one all-reduce.

    Args:
        parameter_placements: Placement of all parameters (default ``Shard(0)``, the
            experts), or of each by name; parameters that are not named are an error.
        input_layouts: Layout of each positional input that is a plain tensor; None for
            an input to leave alone. Default: one input, ``Replicate()``. Keyword inputs
            are left alone; one that requires a gradient is an error.
        desired_input_layouts: Layout that the computation reads, for each of them.
        output_layouts: Layout of the summed output; default ``Replicate()``.
        use_local_output: Return this rank's tensor (the default), or a DTensor.
        packed: Parameters that are several of equal size, side by side in the dimension
            that is sharded, and how many: each is sharded by itself, as the gate and up of
            packed experts must be. The state dict has the whole parameter.

    Example:
        >>> style = ExpertParallel(
        ...     input_layouts=(Replicate(), Replicate()),
        ...     desired_input_layouts=(Replicate(), Shard(-1)),
        ... )
        >>> style.output_layouts
        (Replicate(),)
    """

    parameter_placements: Placement | Mapping[str, Placement] | None = None
    input_layouts: Layouts | None = None
    desired_input_layouts: Layouts | None = None
    output_layouts: Placement | tuple[Placement] | None = None
    use_local_output: bool = True
    packed: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        given = many_layouts(_default(self.input_layouts, Replicate()))
        needed = many_layouts(_default(self.desired_input_layouts, given))
        if len(given) != len(needed):
            raise LayoutCountError(
                "input_layouts and desired_input_layouts should have same length! "
                f"{name} has {len(given)} and {len(needed)}."
            )
        check_layouts(self, "input_layouts", given)
        check_layouts(self, "desired_input_layouts", needed)
        wanted = one_layout(self, "output_layouts", self.output_layouts, Replicate())
        object.__setattr__(self, "input_layouts", given)
        object.__setattr__(self, "desired_input_layouts", needed)
        object.__setattr__(self, "output_layouts", wanted)
        for argument in ("parameter_placements", "packed"):
            given_names = getattr(self, argument)
            if isinstance(given_names, Mapping):
                pairs = tuple(sorted(given_names.items(), key=str))
                object.__setattr__(self, argument, pairs)

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """The placement of each parameter of the module and of its children."""
        names = [name for name, _ in module.named_parameters()]
        placements = self.parameter_placements
        if isinstance(placements, tuple):
            return {n: p for n, p in dict(placements).items() if n in names}
        chosen = placements if isinstance(placements, Placement) else Shard(0)
        return dict.fromkeys(names, chosen)

    def parameter_cuts(self, module: nn.Module, num_ranks: int) -> dict[str, Cut]:
        """Matrices that lie side by side in one parameter are cut one by one."""
        cuts = super().parameter_cuts(module, num_ranks)
        for name, count in self._packed():
            layout = cuts[name][0].layout if name in cuts else None
            if isinstance(layout, Shard):  # else it is one of the problems
                size = module.get_parameter(name).size(layout.dim) // max(count, 1)
                cuts[name] = (Slab(size, layout),) * count
        return cuts

    def layouts(self, module: nn.Module) -> StyleLayouts:
        """Every rank computes a partial value."""
        given, needed = self.input_layouts, self.desired_input_layouts
        assert isinstance(given, tuple) and isinstance(needed, tuple)
        assert isinstance(self.output_layouts, tuple)
        (wanted,) = self.output_layouts
        return StyleLayouts(given, needed, Partial(), wanted, self.use_local_output)

    def find_problems(self, module: nn.Module) -> list[str]:
        """Every parameter needs a placement, and has one only once."""
        problems = describe_placed(module) or describe_styled(module, "forward")
        problems += describe_computed(module)
        names = {name for name, _ in module.named_parameters()}
        placements = self.parameter_placements
        if isinstance(placements, tuple):
            named = {name for name, _ in placements}
            problems += [f"it has no parameter {n!r}" for n in sorted(named - names)]
            problems += [
                f"parameter {n!r} has no layout" for n in sorted(names - named)
            ]
        return problems + self._find_packing_problems(module)

    def _find_packing_problems(self, module: nn.Module) -> list[str]:
        layouts = self.parameter_layouts(module)
        problems = []
        for name, count in self._packed():
            layout = layouts.get(name)
            if not isinstance(layout, Shard) or "." in name:
                problems.append(
                    f"packed names {name!r}, which is no sharded parameter of its own"
                )
            elif count < 1 or module.get_parameter(name).size(layout.dim) % count:
                problems.append(
                    f"dimension {layout.dim} of {name!r} does not divide into {count}"
                )
        return problems

    def _packed(self) -> tuple[tuple[str, int], ...]:
        return self.packed if isinstance(self.packed, tuple) else ()

    def place_fitting(self, module: nn.Module, place: Place) -> None:
        """Shard the parameters and let the module's own forward run on the shards."""
        layouts = self.parameter_layouts(module)
        packed = {}
        for name, count in self._packed():
            layout = layouts.pop(name)
            assert isinstance(layout, Shard)
            dim = layout.dim % module.get_parameter(name).ndim
            size = module.get_parameter(name).size(dim) // count
            parts = tuple(Part(start=i * size, size=size) for i in range(count))
            where = place.where(self)
            packed[name] = SplitParameter(name, parts, dim, place.axis, where)
            packed[name].place(module, place.src_data_rank)
            module.register_parameter(name, None)  # where the forward finds its shard
        _place_all(layouts, module, place)
        module.forward = LocalForward(self, module, place, packed)
        mark_styled(module, "forward", type(self).__name__)


@dataclass(frozen=True, kw_only=True)
class ReplicateParallel(PlacedStyle):
    """Keep a module whole on every rank, with DTensor parameters.

    Every rank computes the same from the same input, on plain tensors, and sends
    nothing. For what lies beside sharded layers: the small half of a LoRA adapter, a
    router, a norm. Its parameters are then DTensors like all others, so that one
    optimizer and one gradient norm take them together.

    Args:
        num_inputs: How many positional inputs the module takes.
        use_local_output: Return this rank's tensor (the default), or a DTensor.

    Example:
        >>> ReplicateParallel()
        ReplicateParallel(num_inputs=1, use_local_output=True)
    """

    num_inputs: int = 1
    use_local_output: bool = True

    def __post_init__(self) -> None:
        if self.num_inputs < 1:
            raise LayoutError(
                f"ReplicateParallel: num_inputs is {self.num_inputs}; pass how many "
                "positional inputs the module takes."
            )

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """Everything is replicated."""
        return {name: Replicate() for name, _ in module.named_parameters()}

    def layouts(self, module: nn.Module) -> StyleLayouts:
        """Every rank reads and computes the same."""
        given, whole = (Replicate(),) * self.num_inputs, Replicate()
        return StyleLayouts(given, given, whole, whole, self.use_local_output)

    def find_problems(self, module: nn.Module) -> list[str]:
        """Any module that has no layout yet will do."""
        placed = describe_placed(module) or describe_styled(module, "forward")
        return placed + describe_hooked(module)

    def place_fitting(self, module: nn.Module, place: Place) -> None:
        """Replicate the parameters and let the module's own forward run on them."""
        _place_all(self.parameter_layouts(module), module, place)
        module.forward = LocalForward(self, module, place)
        mark_styled(module, "forward", type(self).__name__)


def _place_all(layouts: dict[str, Placement], module: nn.Module, place: Place) -> None:
    for path, placement in layouts.items():
        owner, _, name = path.rpartition(".")
        part = module.get_submodule(owner)
        place_parameter(part, name, placement, place.axis, place.src_data_rank)


def _default(layouts: Layouts | None, default: Layouts) -> Layouts:
    return default if layouts is None else layouts
