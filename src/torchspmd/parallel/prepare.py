"""Change the layouts of a module's inputs and outputs, whatever the module does."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Placement

from torchspmd.errors import LayoutCountError, LayoutError, UnsupportedModuleError
from torchspmd.parallel.prepare_hooks import PrepareInputs, PrepareOutputs
from torchspmd.parallel.style import (
    Place,
    PlacedStyle,
    check_layout,
    describe_styled,
    mark_styled,
)

Layouts = Placement | tuple[Placement | None, ...]


@dataclass(frozen=True, kw_only=True)
class PrepareModuleInput(PlacedStyle):
    """Take a module's inputs as given in some layouts, and hand them on in others.

    Args:
        input_layouts: Layout of each positional input that is a plain tensor; None for
            an input to leave alone.
        desired_input_layouts: Layout in which the module gets each of them.
        input_kwarg_layouts: The same for keyword inputs, by name.
        desired_input_kwarg_layouts: The same for keyword inputs, by name.
        use_local_output: Hand on this rank's tensor, or a DTensor (the default).

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
        _check_all(self, "input_layouts", given)
        _check_all(self, "desired_input_layouts", desired)

    def _freeze_keywords(self) -> None:
        given = dict(self.input_kwarg_layouts or {})
        desired = dict(self.desired_input_kwarg_layouts or {})
        if given.keys() != desired.keys():
            raise LayoutCountError(
                "input_kwarg_layouts and desired_input_kwarg_layouts should have same "
                f"length! They must have the same names: {sorted(given)} and "
                f"{sorted(desired)}."
            )
        _check_all(self, "input_kwarg_layouts", tuple(given.values()))
        _check_all(self, "desired_input_kwarg_layouts", tuple(desired.values()))
        object.__setattr__(self, "input_kwarg_layouts", _FrozenDict(given))
        object.__setattr__(self, "desired_input_kwarg_layouts", _FrozenDict(desired))

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Register the hook that prepares the inputs."""
        _refuse(self.find_problems(module), place)
        hook = PrepareInputs(
            given=_many(self.input_layouts),
            desired=_many(self.desired_input_layouts),
            given_keywords=self.input_kwarg_layouts or {},
            desired_keywords=self.desired_input_kwarg_layouts or {},
            positions={n: i for i, n in enumerate(_positional_names(module))},
            local_output=self.use_local_output,
            axis=place.axis,
            path=place.path,
        )
        module.register_forward_pre_hook(hook, with_kwargs=True)
        mark_styled(module, "inputs", type(self).__name__)
        return module

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
    """Take a module's outputs as made in some layouts, and hand them on in others.

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
        _check_all(self, "output_layouts", given)
        _check_all(self, "desired_output_layouts", desired)
        object.__setattr__(self, "output_layouts", given)
        object.__setattr__(self, "desired_output_layouts", desired)

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Register the hook that prepares the outputs."""
        _refuse(self.find_problems(module), place)
        hook = PrepareOutputs(
            given=_many(self.output_layouts) or (),
            desired=_many(self.desired_output_layouts) or (),
            local_output=self.use_local_output,
            axis=place.axis,
            path=place.path,
        )
        module.register_forward_hook(hook)
        mark_styled(module, "outputs", type(self).__name__)
        return module

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

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Register both hooks."""
        _refuse(self.find_problems(module), place)
        self.prepare_module_input.place(module, place)
        return self.prepare_module_output.place(module, place)


def _many(layouts: Layouts | None) -> tuple[Placement | None, ...] | None:
    if layouts is None:
        return None
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


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


def _refuse(problems: list[str], place: Place) -> None:
    if problems:
        text = "; ".join(problems)
        raise UnsupportedModuleError(f"'{place.path}' on the {place.axis}: {text}.")


def _check_all(
    style: object, argument: str, layouts: tuple[Placement | None, ...] | None
) -> None:
    for layout in layouts or ():
        if layout is not None:
            check_layout(type(style).__name__, argument, layout)


class _FrozenDict(dict[str, Placement]):
    """A dict that a frozen style may hold: it hashes, and refuses to change."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))
