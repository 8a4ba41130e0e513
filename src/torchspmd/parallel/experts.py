"""Experts of a mixture whose weights are stacked, and modules that stay whole."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchspmd.errors import LayoutCountError, LayoutError, UnsupportedModuleError
from torchspmd.parallel.computed import describe_computed, describe_hooked
from torchspmd.parallel.local_run import LocalRule, run_on_shards
from torchspmd.parallel.parameters import place_parameter
from torchspmd.parallel.style import (
    Place,
    PlacedStyle,
    check_layout,
    describe_placed,
    describe_styled,
    mark_styled,
    one_layout,
)

Layouts = Placement | tuple[Placement | None, ...]


@dataclass(frozen=True, kw_only=True)
class ExpertParallel(PlacedStyle):
    """Shard stacked expert weights; every rank adds the terms of its own experts.

    The module's own forward runs on plain tensors: its parameters are this rank's
    shards, its inputs are in ``desired_input_layouts``, and what it returns is a term of
    the sum over the ranks. That is right for experts whose outputs are added: a dense
    router's weights ``(tokens, experts)`` are cut to this rank's experts with
    ``Shard(-1)``. Sharding a hidden dimension of the experts (``{"up": Shard(2),
    "down": Shard(1)}``) is right as well. The gradients of replicated parameters are
    summed over the ranks, in one all-reduce.

    Args:
        parameter_placements: Placement of all parameters (default ``Shard(0)``, the
            experts), or of each by name; parameters that are not named are an error.
        input_layouts: Layout of each positional input that is a plain tensor; None for
            an input to leave alone. Default: one input, ``Replicate()``. Keyword inputs
            are left alone; one that requires a gradient is an error.
        desired_input_layouts: Layout that the computation reads, for each of them.
        output_layouts: Layout of the summed output; default ``Replicate()``.
        use_local_output: Return this rank's tensor (the default), or a DTensor.

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

    def __post_init__(self) -> None:
        name = type(self).__name__
        given = _many(self.input_layouts, (Replicate(),))
        needed = _many(self.desired_input_layouts, given)
        if len(given) != len(needed):
            raise LayoutCountError(
                "input_layouts and desired_input_layouts should have same length! "
                f"{name} has {len(given)} and {len(needed)}."
            )
        for argument, layouts in (
            ("input_layouts", given),
            ("desired_input_layouts", needed),
        ):
            for layout in layouts:
                if layout is not None:
                    check_layout(name, argument, layout)
        wanted = one_layout(self, "output_layouts", self.output_layouts, Replicate())
        object.__setattr__(self, "input_layouts", given)
        object.__setattr__(self, "desired_input_layouts", needed)
        object.__setattr__(self, "output_layouts", wanted)
        placements = self.parameter_placements
        if isinstance(placements, Mapping):
            object.__setattr__(
                self, "parameter_placements", tuple(sorted(placements.items(), key=str))
            )

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """The placement of each parameter of the module and of its children."""
        names = [name for name, _ in module.named_parameters()]
        placements = self.parameter_placements
        if isinstance(placements, tuple):
            return {n: p for n, p in dict(placements).items() if n in names}
        chosen = placements if isinstance(placements, Placement) else Shard(0)
        return dict.fromkeys(names, chosen)

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
        return problems

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Shard the parameters and let the module's own forward run on the shards."""
        problems = self.find_problems(module)
        if problems:
            text = "; ".join(problems)
            raise UnsupportedModuleError(f"'{place.path}' on the {place.axis}: {text}.")
        _place_all(self.parameter_layouts(module), module, place)
        run_on_shards(module, self._rule(place))
        mark_styled(module, "forward", type(self).__name__)
        return module

    def _rule(self, place: Place) -> LocalRule:
        assert isinstance(self.input_layouts, tuple)
        assert isinstance(self.desired_input_layouts, tuple)
        assert isinstance(self.output_layouts, tuple)
        return LocalRule(
            axis=place.axis,
            style=type(self).__name__,
            path=place.path,
            given=self.input_layouts,
            needed=self.desired_input_layouts,
            made=Partial(),
            wanted=self.output_layouts[0],
            local_output=self.use_local_output,
        )


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

    def find_problems(self, module: nn.Module) -> list[str]:
        """Any module that has no layout yet will do."""
        placed = describe_placed(module) or describe_styled(module, "forward")
        return placed + describe_hooked(module)

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Replicate the parameters and let the module's own forward run on them."""
        problems = self.find_problems(module)
        if problems:
            raise UnsupportedModuleError(f"'{place.path}': {problems[0]}.")
        _place_all(self.parameter_layouts(module), module, place)
        layouts = (Replicate(),) * self.num_inputs
        rule = LocalRule(
            axis=place.axis,
            style=type(self).__name__,
            path=place.path,
            given=layouts,
            needed=layouts,
            made=Replicate(),
            wanted=Replicate(),
            local_output=self.use_local_output,
        )
        run_on_shards(module, rule)
        mark_styled(module, "forward", type(self).__name__)
        return module


def _place_all(layouts: dict[str, Placement], module: nn.Module, place: Place) -> None:
    for path, placement in layouts.items():
        owner, _, name = path.rpartition(".")
        part = module.get_submodule(owner)
        place_parameter(part, name, placement, place.axis, place.src_data_rank)


def _many(
    layouts: Layouts | None, default: tuple[Placement | None, ...]
) -> tuple[Placement | None, ...]:
    if layouts is None:
        return default
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)
