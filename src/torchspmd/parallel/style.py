"""What every style has: a frozen value that says how one module lies on one mesh axis.

``place`` is the only part that changes a module. ``parameter_layouts`` and
``find_problems`` are pure, so that a whole plan can be checked before anything moves.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torchspmd.errors import LayoutError, UnsupportedModuleError
from torchspmd.parallel.axis import Axis, build_axis

# Set on a module; parameters show their styles themselves, other modules show nothing.
_STYLED = "_torchspmd_styled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a style is applied: the module's path and the mesh axis.

    Attributes:
        axis: The mesh axis.
        path: The module's name in the model; empty for the model itself.
        src_data_rank: Rank of the axis whose values every rank gets; None keeps each
            rank's own.
    """

    axis: Axis
    path: str = ""
    src_data_rank: int | None = 0

    def where(self, style: "ParallelStyle") -> str:
        """How errors name the module: its path, its style and its mesh."""
        name = f"'{self.path}'" if self.path else "the module"
        return f"{name} with {type(style).__name__} on the {self.axis}"


class StyleLayouts(NamedTuple):
    """The layouts that a style gives the inputs and the output of a module.

    Attributes:
        inputs: Layout of each positional input that is a plain tensor; None leaves an
            input alone.
        desired_inputs: Layout that the computation reads, for each of them.
        computed: Layout that the computation writes.
        output: Layout that the module returns.
        local_output: Return this rank's part, not a DTensor.
    """

    inputs: tuple[Placement | None, ...]
    desired_inputs: tuple[Placement | None, ...]
    computed: Placement
    output: Placement
    local_output: bool


class Slab(NamedTuple):
    """Some rows of a parameter, or all of it (None), and how they lie on the axis."""

    size: int | None
    layout: Placement


Cut = tuple[Slab, ...]  # side by side on the dimension that is cut


class ParallelStyle(ABC):
    """Base class of all styles; subclass it for your own.

    Your own style needs only ``_apply``. It may read ``self.src_data_rank``, which is
    set on a copy of the style: the object in the plan is never written to.

    Example:
        >>> class Frozen(ParallelStyle):
        ...     def _apply(self, module, device_mesh):
        ...         return module.requires_grad_(False)
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Lay ``module`` over ``device_mesh`` and return it."""

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Lay ``module`` over one axis and return it."""
        style = copy.copy(self)
        object.__setattr__(style, "src_data_rank", place.src_data_rank)
        return style._apply(module, place.axis.mesh)

    def parameter_layouts(self, module: nn.Module) -> dict[str, Placement]:
        """The placement that each of the module's own parameters gets."""
        return {}

    def parameter_cuts(self, module: nn.Module, num_ranks: int) -> dict[str, Cut]:
        """The cuts on this many ranks, part by part where a parameter is kept in parts."""
        layouts = self.parameter_layouts(module)
        return {name: (Slab(None, layout),) for name, layout in layouts.items()}

    def layouts(self, module: nn.Module) -> StyleLayouts | None:
        """The layouts of the module's inputs and output; None where it does not say."""
        return None

    def find_problems(self, module: nn.Module) -> list[str]:
        """Why this style does not fit this module; empty when it does."""
        return []

    def find_axis_problems(self, module: nn.Module, num_ranks: int) -> list[str]:
        """Why this style does not fit this module on so many ranks."""
        return []


class PlacedStyle(ParallelStyle):
    """Base of the styles of this package: they know where they are applied."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.place(module, Place(axis=build_axis(device_mesh)))

    def place(self, module: nn.Module, place: Place) -> nn.Module:
        """Lay ``module`` over one axis and return it.

        Raises:
            UnsupportedModuleError: The style does not fit the module.
        """
        problems = self.find_problems(module)
        problems = problems or self.find_axis_problems(module, place.axis.size)
        if problems:
            text = "; ".join(problems)
            raise UnsupportedModuleError(f"'{place.path}' on the {place.axis}: {text}.")
        self.place_fitting(module, place)
        return module

    @abstractmethod
    def place_fitting(self, module: nn.Module, place: Place) -> None:
        """Lay a module that the style fits over one axis."""


def one_layout(
    style: ParallelStyle, argument: str, value: object, default: Placement
) -> tuple[Placement]:
    """A layout argument as the tuple that torch's styles keep; None is the default."""
    if isinstance(value, tuple) and len(value) == 1:
        value = value[0]
    placement = default if value is None else value
    check_layout(type(style).__name__, argument, placement)
    assert isinstance(placement, Placement)
    return (placement,)


Layouts = Placement | tuple[Placement | None, ...]


def many_layouts(layouts: Layouts) -> tuple[Placement | None, ...]:
    """Layouts of several tensors; one alone is that of the only tensor."""
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)


def check_layouts(
    style: object, argument: str, layouts: tuple[Placement | None, ...] | None
) -> None:
    """Raise for an entry that is not a layout."""
    for layout in layouts or ():
        if layout is not None:
            check_layout(type(style).__name__, argument, layout)


def check_layout(call: str, argument: str, value: object) -> None:
    """A layout is one placement of three kinds; sums are the only partial ones."""
    known = type(value) in (Replicate, Shard, Partial)
    if known and not (isinstance(value, Partial) and value.reduce_op != "sum"):
        return
    raise LayoutError(
        f"{call}: {argument} is {value!r}; a layout is Replicate(), Shard(dim) or "
        "Partial() on the one axis of the mesh."
    )


def already_placed(module: nn.Module) -> list[str]:
    """Names of the parameters in the module that are DTensors already."""
    every = module.named_parameters()
    return [name for name, parameter in every if isinstance(parameter, DTensor)]


def mark_styled(module: nn.Module, part: str, style: str) -> None:
    """Note that a style controls a part of the module: inputs, outputs or forward."""
    known = getattr(module, _STYLED, ())
    setattr(module, _STYLED, (*known, (part, style)))


def describe_styled(module: nn.Module, part: str) -> list[str]:
    """The problem of a module whose part another style controls already."""
    taken = dict(getattr(module, _STYLED, ()))
    if part not in taken:
        return []
    return [
        f"{taken[part]} has placed the {part} of this module already; give a module one "
        "style, which does what both should"
    ]


def describe_placed(module: nn.Module) -> list[str]:
    """The problem of a module that has a layout already, as ``find_problems`` says it."""
    names = already_placed(module)
    if not names:
        return []
    listed = ", ".join(names)
    return [
        f"{listed}: already a DTensor, so another style has placed this module; give a "
        "module one style that shards its parameters"
    ]
