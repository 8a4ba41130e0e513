"""What the ``PrepareModule`` styles do at each call, as hooks that pickle."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from torchspmd.errors import LayoutError
from torchspmd.parallel.axis import (
    Axis,
    describe_uneven,
    global_shape,
    is_uneven,
    layout_of,
    positive_dim,
)
from torchspmd.parallel.handover import hand_on, settle

Many = tuple[Placement | None, ...]


@dataclass(frozen=True, slots=True)
class PrepareInputs:
    """Forward pre-hook: positional and keyword inputs from one layout to another."""

    given: Many | None
    desired: Many | None
    given_keywords: Mapping[str, Placement]
    desired_keywords: Mapping[str, Placement]
    positions: Mapping[str, int]
    local_output: bool
    axis: Axis
    path: str

    def __call__(
        self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Inputs in the layouts that the module reads."""
        given, desired = self.given, self.desired
        if given is not None and desired is not None:
            if len(inputs) != len(given):
                raise LayoutError(_wrong_count(self, module, "input", inputs, given))
            names = [f"input {i}" for i in range(len(given))]
            inputs = tuple(map(self._prepare, names, inputs, given, desired))
        if not self.given_keywords.keys() <= keywords.keys():
            self._check_absent(len(inputs), keywords)
        keywords = {
            name: self._prepare(
                f"input {name!r}",
                value,
                self.given_keywords.get(name),
                self.desired_keywords.get(name),
            )
            for name, value in keywords.items()
        }
        return inputs, keywords

    def _check_absent(self, num_inputs: int, keywords: dict[str, Any]) -> None:
        """A keyword's layout may wait for another call, unless its input came here."""
        by_position = [
            name
            for name in self.given_keywords
            if name not in keywords
            and self.positions.get(name, num_inputs) < num_inputs
        ]
        if by_position:
            names = ", ".join(map(repr, by_position))
            where = _where(self.path, "PrepareModuleInput", self.axis, f"input {names}")
            raise LayoutError(
                f"{where} was passed by position, but input_kwarg_layouts has its "
                "layout. Pass it by name, or give its layout in input_layouts."
            )

    def _prepare(
        self, name: str, value: Any, given: Placement | None, desired: Placement | None
    ) -> Any:
        if given is None:
            return value
        where = _where(self.path, "PrepareModuleInput", self.axis, name)
        return _change(value, given, desired, self.axis, self.local_output, where)


@dataclass(frozen=True, slots=True)
class PrepareOutputs:
    """Forward hook: outputs from one layout to another."""

    given: Many
    desired: Many
    local_output: bool
    axis: Axis
    path: str

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        """Outputs in the layouts that the caller wants."""
        given, desired = self.given, self.desired
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        if len(values) != len(given):
            raise LayoutError(_wrong_count(self, module, "output", values, given))
        prepared = tuple(
            value if layout is None else self._prepare(i, value, layout, wanted)
            for i, (value, layout, wanted) in enumerate(
                zip(values, given, desired, strict=True)
            )
        )
        return prepared if len(prepared) > 1 else prepared[0]

    def _prepare(
        self, index: int, value: Any, given: Placement, desired: Placement | None
    ) -> Any:
        where = _where(self.path, "PrepareModuleOutput", self.axis, f"output {index}")
        return _change(value, given, desired, self.axis, self.local_output, where)


def _change(
    value: Any,
    given: Placement,
    desired: Placement | None,
    axis: Axis,
    local_output: bool,
    where: str,
) -> torch.Tensor:
    """One tensor, taken in one layout and handed on in another."""
    if not isinstance(value, torch.Tensor):
        raise LayoutError(
            f"{where} is a {type(value).__name__}; expecting input to be a "
            "torch.Tensor! Write None as its layout to leave it alone."
        )
    if isinstance(value, DTensor):
        settled: DTensor = value if desired is None else settle(value)
        source, shape = layout_of(settled, axis, where), tuple(settled.shape)
        if not local_output and desired in (None, source):
            return settled
        value = settled
    else:
        source = positive_dim(given, value.ndim)
        shape = global_shape(tuple(value.shape), source, axis.size)
    target = source if desired is None else positive_dim(desired, value.ndim)
    if local_output and is_uneven(shape, target, axis):
        raise LayoutError(describe_uneven(shape, target, axis, where))
    return hand_on(value, source, target, axis, shape, as_dtensor=not local_output)


def _where(path: str, style: str, axis: Axis, argument: str) -> str:
    name = f"'{path}'" if path else "the module"
    return f"{name} with {style} on the {axis}: {argument}"


def _wrong_count(
    hook: PrepareInputs | PrepareOutputs,
    module: nn.Module,
    kind: str,
    values: tuple[Any, ...],
    layouts: tuple[Any, ...],
) -> str:
    name = f"'{hook.path}'" if hook.path else f"the {type(module).__name__}"
    return (
        f"module {kind}s and {kind}_layouts should have same length! {name} on the "
        f"{hook.axis} has {len(values)} positional {kind}s, {kind}_layouts has "
        f"{len(layouts)}: {layouts}. Write None for one to leave alone."
    )
