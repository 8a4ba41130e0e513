"""Column-wise layers that read one tensor: let them sum its gradient once.

Each column-wise layer sums the gradient of its input over the ranks. The projections of
attention, and gate and up of an MLP, read the same tensor: when the module around them
gets it as a DTensor, its gradient stays a partial value until all have added to it, and
one sum serves them all.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Placement, Replicate

from torchspmd.errors import PlanError, PlanWarning
from torchspmd.parallel.linear import ColwiseParallel
from torchspmd.parallel.plan.assignment import Assignment
from torchspmd.parallel.plan.names import (
    fold_texts,
    listed,
    module_tree,
    shortest_patterns,
)
from torchspmd.parallel.plan.plan import Style
from torchspmd.parallel.plan.resolve import resolve
from torchspmd.parallel.plan.run import (
    FunctionCall,
    Inputs,
    ModuleCall,
    NotRunnableError,
    guess_inputs,
    record,
)
from torchspmd.parallel.prepare import PrepareModuleInput

_WHOLE = Replicate()
_BATCH, _SEQ = 2, 8  # any sizes will do


class _Uses(NamedTuple):
    """What reads each tensor, by the tensor's identity: Linears, and other functions."""

    by_linear: Counter[int]
    by_others: dict[int, dict[str, None]]


def shared_inputs(
    plan: Mapping[str, Style], model: nn.Module, example: Inputs | None
) -> dict[str, Style]:
    """The styles to add for modules whose column-wise layers share an input."""
    assignments = resolve(plan, model, {"tp": 1}, call="Plan.share_inputs").assignments
    families = dict(_families(assignments))
    try:
        inputs = example if example is not None else guess_inputs(model, _BATCH, _SEQ)
        recording = record(model, inputs, _all_paths(families))
    except NotRunnableError as error:
        raise PlanError(
            f"Plan.share_inputs: {type(model).__name__} does not run on shapes alone "
            f"({error}). Pass example_inputs=, or leave the plan as it is."
        ) from error
    calls, uses = recording.module_calls, _find_uses(recording.function_calls)
    found: dict[str, Style] = {}
    reasons = []
    for parent, children in families.items():
        style = _find_style(parent, children, calls, uses)
        if isinstance(style, str):
            reasons.append(f"{_names(children)}: {style}")
        else:
            found[parent] = style
    if not found:
        _warn(model, reasons)
    return shortest_patterns(module_tree(model), found)


def _names(paths: list[str]) -> str:
    return ", ".join(f"'{path}'" for path in paths)


def _warn(model: nn.Module, reasons: list[str]) -> None:
    none = (
        "no module without a style has two column-wise Linears right inside it that "
        "take a whole input"
    )
    lines = "".join(f"\n  * {text}" for text in fold_texts(reasons) or [none])
    warnings.warn(
        f"Plan.share_inputs: nothing in {type(model).__name__} could be shared, and the "
        f"plan stays as it is.{lines}",
        PlanWarning,
        stacklevel=4,
    )


def _families(assignments: Iterable[Assignment]) -> Iterator[tuple[str, list[str]]]:
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
    parent: str, children: list[str], calls: list[ModuleCall], uses: _Uses
) -> Style | str:
    """The style that makes the shared input a DTensor, or why that is not safe."""
    styles = {
        _style_for(call, [c for c in calls if c.path in children], uses)
        for call in calls
        if call.path == parent
    }
    if not styles:
        return f"'{parent}' was not called"
    if len(styles) > 1:
        return (
            f"'{parent}' is called in different ways, for which there is no one style"
        )
    return styles.pop()


def _style_for(call: ModuleCall, readers: list[ModuleCall], uses: _Uses) -> Style | str:
    read = [info.identity for c in readers if (info := c.inputs[0]) is not None]
    common = {identity for identity in read if read.count(identity) > 1}
    if not common:
        return "they do not read one tensor"
    # Anything else that reads it would get a DTensor.
    others = {identity: _others(identity, read, uses) for identity in common}
    shared = {identity for identity in common if not others[identity]}
    if not shared:
        names = listed(dict.fromkeys(name for o in others.values() for name in o))
        return (
            f"the tensor that they read is also read by {names}, which would get a "
            "DTensor; hand them one of their own, such as the output of a norm"
        )
    by_place = tuple(
        _WHOLE if info is not None and info.identity in shared else None
        for info in call.inputs
    )
    by_name: dict[str, Placement] = {
        name: _WHOLE
        for name, info in call.keywords.items()
        if info is not None and info.identity in shared
    }
    if not by_name and not any(by_place):
        return f"the tensor that they read is not an argument of '{call.path}'"
    layouts = by_place if any(by_place) else None
    return PrepareModuleInput(
        input_layouts=layouts,
        desired_input_layouts=layouts,
        input_kwarg_layouts=by_name,
        desired_input_kwarg_layouts=by_name,
    )


def _others(identity: int, read: list[int], uses: _Uses) -> list[str]:
    """What reads a tensor besides the layers that share it."""
    names = list(uses.by_others.get(identity, ()))
    if uses.by_linear.get(identity) != read.count(identity):
        names.append("another Linear")
    return names


def _find_uses(calls: Iterable[FunctionCall]) -> _Uses:
    uses = _Uses(Counter(), {})
    for call in calls:
        if call.func is F.linear:
            uses.by_linear[id(call.inputs[0])] += 1
        elif call.outputs:  # not for a shape or a dtype
            for tensor in call.inputs:
                uses.by_others.setdefault(id(tensor), {})[call.name] = None
    return uses
