"""Column-wise layers that read one tensor: let them sum its gradient once.

Each column-wise layer sums the gradient of its input over the ranks. The projections of
attention, and gate and up of an MLP, read the same tensor: when the module around them
gets it as a DTensor, its gradient stays in terms until all have added to it, and one sum
serves them all.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Placement, Replicate
from torch.overrides import TorchFunctionMode

from torchspmd.errors import PlanError
from torchspmd.parallel.colwise import ColwiseParallel
from torchspmd.parallel.plan import Style
from torchspmd.parallel.plan_assignment import Assignment
from torchspmd.parallel.plan_calls import (
    Call,
    Inputs,
    NotRunnableError,
    guess_inputs,
    run_on_shapes,
)
from torchspmd.parallel.plan_flow import tensors_in
from torchspmd.parallel.plan_names import module_tree, shortest_patterns
from torchspmd.parallel.prepare import PrepareModuleInput
from torchspmd.parallel.resolve import resolve

_WHOLE = Replicate()
_BATCH, _SEQ = 2, 8  # any sizes will do


def shared_inputs(
    plan: Mapping[str, Style], model: nn.Module, example: Inputs | None
) -> dict[str, Style]:
    """The styles to add for modules whose column-wise layers share an input."""
    assignments = resolve(plan, model, {"tp": 1}, call="Plan.share_inputs").assignments
    families = dict(_families(model, assignments))
    uses = _Uses()
    try:
        inputs = example if example is not None else guess_inputs(model, _BATCH, _SEQ)
        with uses:
            calls = run_on_shapes(model, _all_paths(families), inputs)
    except NotRunnableError as error:
        raise PlanError(
            f"Plan.share_inputs: {type(model).__name__} does not run on shapes alone "
            f"({error}). Pass example_inputs=, or leave the plan as it is."
        ) from error
    found: dict[str, Style] = {}
    for parent, children in families.items():
        style = _find_style(parent, children, calls, uses)
        if style is not None:
            found[parent] = style
    return shortest_patterns(module_tree(model), found)


def _families(
    model: nn.Module, assignments: Iterable[Assignment]
) -> Iterator[tuple[str, list[str]]]:
    """Modules without a style, with two or more column-wise Linears right inside."""
    styled = {assignment.path for assignment in assignments}
    children: dict[str, list[str]] = {}
    for assignment in assignments:
        style = assignment.style
        if not isinstance(style, ColwiseParallel) or not assignment.path:
            continue
        if style.input_layouts == (_WHOLE,) and isinstance(
            assignment.module, nn.Linear
        ):
            parent = assignment.path.rpartition(".")[0]
            children.setdefault(parent, []).append(assignment.path)
    for parent, paths in children.items():
        if len(paths) > 1 and parent not in styled:
            yield parent, paths


def _all_paths(families: Mapping[str, list[str]]) -> list[str]:
    return [*families, *(path for paths in families.values() for path in paths)]


def _find_style(
    parent: str, children: list[str], calls: list[Call], uses: "_Uses"
) -> Style | None:
    """The style that makes the shared input a DTensor; None where that is not safe."""
    styles = {
        _style_for(call, [c for c in calls if c.path in children], uses)
        for call in calls
        if call.path == parent
    }
    # A module that is called in different ways has no one style for them.
    return styles.pop() if len(styles) == 1 else None


def _style_for(call: Call, readers: list[Call], uses: "_Uses") -> Style | None:
    read = [facts.identity for c in readers if (facts := c.inputs[0]) is not None]
    shared = {
        identity
        for identity in read
        # Anything else that reads it would meet a DTensor.
        if 1 < read.count(identity) == uses.by_linear.get(identity)
        and identity not in uses.by_others
    }
    by_place = tuple(
        _WHOLE if facts is not None and facts.identity in shared else None
        for facts in call.inputs
    )
    by_name: dict[str, Placement] = {
        name: _WHOLE
        for name, facts in call.keywords.items()
        if facts is not None and facts.identity in shared
    }
    if not by_name and not any(by_place):
        return None
    layouts = by_place if any(by_place) else None
    return PrepareModuleInput(
        input_layouts=layouts,
        desired_input_layouts=layouts,
        input_kwarg_layouts=by_name,
        desired_input_kwarg_layouts=by_name,
    )


class _Uses(TorchFunctionMode):
    """What torch functions make from each tensor, by the tensor's identity."""

    def __init__(self) -> None:
        super().__init__()
        self.by_linear: dict[int, int] = {}
        self.by_others: set[int] = set()
        self._alive: list[torch.Tensor] = []  # ids stay unique while tensors live

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(True for _ in tensors_in(result)):  # not for a shape or a dtype
            given = list(tensors_in([args, kwargs]))
            self._alive += given
            if func is F.linear:
                first = id(given[0])
                self.by_linear[first] = self.by_linear.get(first, 0) + 1
            else:
                self.by_others |= set(map(id, given))
        return result
