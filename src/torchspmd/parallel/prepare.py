"""Change the layouts of a module's inputs and outputs, whatever the module does."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from torchspmd.errors import LayoutCountError, LayoutError
from torchspmd.layout.placements import positive_dim
from torchspmd.parallel.axis import Axis, check_even, layout_of
from torchspmd.parallel.redistribute import arriving, redistribute
from torchspmd.parallel.style import (
    Layouts,
    Place,
    PlacedStyle,
    check_layouts,
    describe_styled,
    many_layouts,
    mark_styled,
)


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInput(PlacedStyle):
    """Take a module's inputs as given in some layouts, and pass them on in others.

    Args:
        input_layouts: Layout of each positional input that is a plain tensor; None for
            an input to leave alone.
        desired_input_layouts: Layout in which the module gets each of them.
        input_kwarg_layouts: The same for keyword inputs, by name.
        desired_input_kwarg_layouts: The same for keyword inputs, by name.
        use_local_output: Pass on this rank's tensor, or a DTensor (the default).

    Example:
        >>> import torch
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from torchspmd.testing import fake_mesh
        >>> from torchspmd.parallel import parallelize_module
        >>> style = PrepareModuleInput(
        ...     input_layouts=Shard(0), desired_input_layouts=Replicate()
        ... )
        >>> with fake_mesh(4, ("tp",)) as mesh:
        ...     parallelize_module(nn.Identity(), mesh, style)(torch.ones(2, 8)).shape
        torch.Size([8, 8])
    """

    input_layouts: Layouts | None = None
    desired_input_layouts: Layouts | None = None
    input_kwarg_layouts: Mapping[str, Placement] | None = None
    desired_input_kwarg_layouts: Mapping[str, Placement] | None = None
    use_local_output: bool = False

    def __post_init__(self) -> None:
        given, desired = _many(self.input_layouts), _many(self.desired_input_layouts)
        if given is not None and desired is None:
            raise LayoutCountError("desired module inputs should not be None!")
        if given is None and desired is not None:
            raise LayoutCountError(
                f"PrepareModuleInput: desired_input_layouts is {desired} without "
                "input_layouts, so it would not be used. Pass the layout in which each "
                "input is given as input_layouts."
            )
        if given is not None and desired is not None and len(given) != len(desired):
            raise LayoutCountError(
                "input_layouts and desired_input_layouts should have same length! "
                f"They have {len(given)} and {len(desired)}; write None for an input to "
                "leave alone."
            )
        _check_pairs("PrepareModuleInput", "input", given or (), desired or ())
        object.__setattr__(self, "input_layouts", given)
        object.__setattr__(self, "desired_input_layouts", desired)
        self._freeze_keywords()
        check_layouts(self, "input_layouts", given)
        check_layouts(self, "desired_input_layouts", desired)

    def _freeze_keywords(self) -> None:
        given = dict(self.input_kwarg_layouts or {})
        desired = dict(self.desired_input_kwarg_layouts or {})
        if given.keys() != desired.keys():
            raise LayoutCountError(
                "input_kwarg_layouts and desired_input_kwarg_layouts should have same "
                f"length! They must have the same names: {sorted(given)} and "
                f"{sorted(desired)}."
            )
        check_layouts(self, "input_kwarg_layouts", tuple(given.values()))
        check_layouts(self, "desired_input_kwarg_layouts", tuple(desired.values()))
        object.__setattr__(self, "input_kwarg_layouts", _FrozenDict(given))
        object.__setattr__(self, "desired_input_kwarg_layouts", _FrozenDict(desired))

    def place_fitting(self, module: nn.Module, place: Place) -> None:
        """Register the hook that prepares the inputs."""
        positions = {n: i for i, n in enumerate(_positional_names(module))}
        hook = PrepareInputs(self, place, positions)
        module.register_forward_pre_hook(hook, with_kwargs=True)
        mark_styled(module, "inputs", type(self).__name__)

    def find_problems(self, module: nn.Module) -> list[str]:
        """A second style of this kind, and keywords that the module does not take."""
        problems = describe_styled(module, "inputs")
        found = _forward_parameters(module)
        unknown = {*(self.input_kwarg_layouts or {})} - {p.name for p in found}
        if unknown and found and all(p.kind is not p.VAR_KEYWORD for p in found):
            problems.append(
                f"input_kwarg_layouts names {', '.join(sorted(unknown))}, which "
                f"{type(module).__name__}.forward does not take; it takes "
                f"{', '.join(p.name for p in found)}"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class PrepareModuleOutput(PlacedStyle):
    """Take a module's outputs as made in some layouts, and pass them on in others.

    Args:
        output_layouts: Layout of each output that is a plain tensor; None for an output
            to leave alone.
        desired_output_layouts: Layout in which each is returned.
        use_local_output: Return this rank's tensor (the default), or a DTensor.

    Example:
        >>> import torch
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from torchspmd.testing import fake_mesh
        >>> from torchspmd.parallel import parallelize_module
        >>> style = PrepareModuleOutput(
        ...     output_layouts=Replicate(), desired_output_layouts=Shard(0)
        ... )
        >>> with fake_mesh(4, ("tp",)) as mesh:
        ...     parallelize_module(nn.Identity(), mesh, style)(torch.ones(8, 8)).shape
        torch.Size([2, 8])
    """

    output_layouts: Layouts
    desired_output_layouts: Layouts
    use_local_output: bool = True

    def __post_init__(self) -> None:
        given, desired = _many(self.output_layouts), _many(self.desired_output_layouts)
        if given is None or desired is None or len(given) != len(desired):
            raise LayoutCountError(
                "output_layouts and desired_output_layouts should have same length! "
                f"They are {given} and {desired}; write None for an output to leave "
                "alone."
            )
        _check_pairs("PrepareModuleOutput", "output", given, desired)
        check_layouts(self, "output_layouts", given)
        check_layouts(self, "desired_output_layouts", desired)
        object.__setattr__(self, "output_layouts", given)
        object.__setattr__(self, "desired_output_layouts", desired)

    def place_fitting(self, module: nn.Module, place: Place) -> None:
        """Register the hook that prepares the outputs."""
        module.register_forward_hook(PrepareOutputs(self, place))
        mark_styled(module, "outputs", type(self).__name__)

    def find_problems(self, module: nn.Module) -> list[str]:
        """A second style of this kind."""
        return describe_styled(module, "outputs")


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInputOutput(PlacedStyle):
    """``PrepareModuleInput`` and ``PrepareModuleOutput`` on one module.

    Args:
        input_layouts: As in ``PrepareModuleInput``.
        desired_input_layouts: As in ``PrepareModuleInput``.
        input_kwarg_layouts: As in ``PrepareModuleInput``.
        desired_input_kwarg_layouts: As in ``PrepareModuleInput``.
        use_local_input: Hand this rank's tensor to the module, or a DTensor (the
            default).
        output_layouts: As in ``PrepareModuleOutput``.
        desired_output_layouts: As in ``PrepareModuleOutput``.
        use_local_output: Return this rank's tensor (the default), or a DTensor.

    Example:
        >>> import torch
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from torchspmd.testing import fake_mesh
        >>> from torchspmd.parallel import parallelize_module
        >>> gathered = PrepareModuleInputOutput(
        ...     input_layouts=Shard(0), desired_input_layouts=Replicate(),
        ...     output_layouts=Replicate(), desired_output_layouts=Shard(0),
        ... )
        >>> with fake_mesh(4, ("tp",)) as mesh:  # sees 8 rows, gives 2 back
        ...     softmax = parallelize_module(nn.Softmax(dim=0), mesh, gathered)
        ...     softmax(torch.ones(2, 5)).shape
        torch.Size([2, 5])
    """

    input_layouts: Layouts | None = None
    desired_input_layouts: Layouts | None = None
    input_kwarg_layouts: Mapping[str, Placement] | None = None
    desired_input_kwarg_layouts: Mapping[str, Placement] | None = None
    use_local_input: bool = False
    output_layouts: Layouts
    desired_output_layouts: Layouts
    use_local_output: bool = True

    def __post_init__(self) -> None:
        _ = self.prepare_module_input, self.prepare_module_output  # both check

    @property
    def prepare_module_input(self) -> PrepareModuleInput:
        """The half for the inputs."""
        return PrepareModuleInput(
            input_layouts=self.input_layouts,
            desired_input_layouts=self.desired_input_layouts,
            input_kwarg_layouts=self.input_kwarg_layouts,
            desired_input_kwarg_layouts=self.desired_input_kwarg_layouts,
            use_local_output=self.use_local_input,
        )

    @property
    def prepare_module_output(self) -> PrepareModuleOutput:
        """The half for the outputs."""
        return PrepareModuleOutput(
            output_layouts=self.output_layouts,
            desired_output_layouts=self.desired_output_layouts,
            use_local_output=self.use_local_output,
        )

    def find_problems(self, module: nn.Module) -> list[str]:
        """What either half finds."""
        problems = self.prepare_module_input.find_problems(module)
        return problems + self.prepare_module_output.find_problems(module)

    def place_fitting(self, module: nn.Module, place: Place) -> None:
        """Register both hooks."""
        self.prepare_module_input.place_fitting(module, place)
        self.prepare_module_output.place_fitting(module, place)


def _many(layouts: Layouts | None) -> tuple[Placement | None, ...] | None:
    return None if layouts is None else many_layouts(layouts)


def _check_pairs(
    style: str,
    kind: str,
    given: tuple[Placement | None, ...],
    desired: tuple[Placement | None, ...],
) -> None:
    """A desired layout is of use only where the given one is known."""
    for i, (layout, wanted) in enumerate(zip(given, desired, strict=True)):
        if layout is None and wanted is not None:
            raise LayoutError(
                f"{style}: {kind} {i} has None in {kind}_layouts and {wanted!r} in "
                f"desired_{kind}_layouts, which would not be used. Pass the layout in "
                f"which it is given, or None in both to leave it alone."
            )


def _forward_parameters(module: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):  # compiled code may show none
        return []


def _positional_names(module: nn.Module) -> list[str]:
    """The names of the inputs that a call may pass by position, in order."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in _forward_parameters(module) if p.kind in kinds]


class _FrozenDict(dict[str, Placement]):
    """A dict that a frozen style may hold: it hashes, and refuses to change."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


# ----------------------------------------------------------------------------
# What the styles do at each call, as hooks that pickle.


@dataclass(frozen=True, slots=True)
class PrepareInputs:
    """Forward pre-hook: positional and keyword inputs from one layout to another."""

    style: PrepareModuleInput
    place: Place
    positions: Mapping[str, int]  # of the inputs that may be passed by position

    def __call__(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs in the layouts that the module reads."""
        given = _many(self.style.input_layouts)
        desired = _many(self.style.desired_input_layouts)
        if given is not None and desired is not None:
            _check_count(self.place, module, "input", inputs, given)
            names = [f"input {i}" for i in range(len(given))]
            inputs = tuple(map(self._prepare, names, inputs, given, desired))
        given_keywords = self.style.input_kwarg_layouts or {}
        desired_keywords = self.style.desired_input_kwarg_layouts or {}
        if not given_keywords.keys() <= keywords.keys():
            self._check_absent(given_keywords, len(inputs), keywords)
        keywords = {
            name: self._prepare(
                f"input {name!r}",
                value,
                given_keywords.get(name),
                desired_keywords.get(name),
            )
            for name, value in keywords.items()
        }
        return inputs, keywords

    def _check_absent(
        self, given: Mapping[str, Placement], num_inputs: int, keywords: dict[str, Any]
    ) -> None:
        """A keyword's layout may wait for another call, unless its input came here."""
        by_position = [
            name
            for name in given
            if name not in keywords
            and self.positions.get(name, num_inputs) < num_inputs
        ]
        if by_position:
            names = ", ".join(map(repr, by_position))
            raise LayoutError(
                f"{self.place.where(self.style)}: input {names} was passed by position, "
                "but input_kwarg_layouts has its layout. Pass it by name, or give its "
                "layout in input_layouts."
            )

    def _prepare(
        self, name: str, value: Any, given: Placement | None, desired: Placement | None
    ) -> Any:
        if given is None:
            return value
        where = f"{self.place.where(self.style)}: {name}"
        local = self.style.use_local_output
        return _change(value, given, desired, self.place.axis, local, where)


@dataclass(frozen=True, slots=True)
class PrepareOutputs:
    """Forward hook: outputs from one layout to another."""

    style: PrepareModuleOutput
    place: Place

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        """Outputs in the layouts that the caller wants."""
        given = _many(self.style.output_layouts) or ()
        desired = _many(self.style.desired_output_layouts) or ()
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        _check_count(self.place, module, "output", values, given)
        where = f"{self.place.where(self.style)}: output"
        local, axis = self.style.use_local_output, self.place.axis
        prepared = tuple(
            _change(value, layout, wanted, axis, local, f"{where} {i}")
            for i, (value, layout, wanted) in enumerate(
                zip(values, given, desired, strict=True)
            )
        )
        return prepared if len(prepared) > 1 else prepared[0]


def _change(
    value: Any,
    given: Placement | None,
    desired: Placement | None,
    axis: Axis,
    local_output: bool,
    where: str,
) -> Any:
    """One tensor from its layout into another; without a layout, as it is."""
    if given is None:
        return value
    if not isinstance(value, torch.Tensor):
        raise LayoutError(
            f"{where} is a {type(value).__name__}; expecting input to be a "
            "torch.Tensor! Write None as its layout to leave it alone."
        )
    if isinstance(value, DTensor) and desired is None and not local_output:
        layout_of(value, axis, where)
        return value
    value, source, shape = arriving(value, given, axis, where)
    target = source if desired is None else positive_dim(desired, value.ndim)
    if isinstance(value, DTensor) and not local_output and source == target:
        return value
    if local_output:
        check_even(shape, target, axis, where)
    return redistribute(value, source, target, axis, shape, as_dtensor=not local_output)


def _check_count(
    place: Place,
    module: nn.Module,
    kind: str,
    values: tuple[Any, ...],
    layouts: tuple[Any, ...],
) -> None:
    if len(values) != len(layouts):
        name = f"'{place.path}'" if place.path else f"the {type(module).__name__}"
        raise LayoutError(
            f"module {kind}s and {kind}_layouts should have same length! {name} on the "
            f"{place.axis} has {len(values)} positional {kind}s, {kind}_layouts has "
            f"{len(layouts)}: {layouts}. Write None for one to leave alone."
        )
