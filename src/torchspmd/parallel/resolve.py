"""From a plan and a model to one style for each module, or every reason why not.

Nothing here changes the model. Each kind of problem has its own file: names in
``plan_names``, heads in ``plan_heads``, parameters that several modules or styles claim
in ``plan_claims``, neighbours in ``plan_handover``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from torchspmd.errors import PlanError, UnsupportedModuleError, UsageError
from torchspmd.parallel.plan import Plan, Style, explain_no_style, is_style
from torchspmd.parallel.plan_assignment import Assignment, find_problems
from torchspmd.parallel.plan_claims import (
    find_broken_ties,
    find_double_claims,
    find_wrapped,
)
from torchspmd.parallel.plan_handover import find_bad_handovers
from torchspmd.parallel.plan_heads import find_cut_heads
from torchspmd.parallel.plan_mesh import MeshLike, PlanMesh, describe_mesh_axis
from torchspmd.parallel.plan_names import (
    explain_no_match,
    fold_texts,
    match,
    module_tree,
)
from torchspmd.parallel.text_form import describe_style


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """A plan that fits its model.

    Attributes:
        assignments: One style for each module that gets one, in the order of the plan.
        mesh: The axis that it was resolved for.
    """

    assignments: tuple[Assignment, ...]
    mesh: PlanMesh


def resolve(
    plan: Style | Mapping[str, Style],
    module: nn.Module,
    mesh: MeshLike | PlanMesh,
    *,
    call: str = "parallelize_module",
) -> Resolved:
    """The style of each module that a plan means; nothing is changed.

    Args:
        plan: A ``Plan``, styles by pattern, or one style for the module itself.
        module: The model.
        mesh: The axis to lay it on, as a mesh or as sizes by name.
        call: What the user called, for texts.

    Raises:
        PlanError: The plan does not fit; the text lists every problem and its fix.
        UnsupportedModuleError: A single style does not fit the module.

    Example:
        >>> from torchspmd.parallel import ColwiseParallel
        >>> model = nn.Sequential(nn.Linear(4, 8))
        >>> resolved = resolve({"*": ColwiseParallel()}, model, {"tp": 2})
        >>> [assignment.path for assignment in resolved.assignments]
        ['0']
    """
    axis = mesh if isinstance(mesh, PlanMesh) else describe_mesh_axis(mesh)
    if not isinstance(plan, Mapping):
        return _resolve_style(plan, module, axis, call)
    heads = plan.heads if isinstance(plan, Plan) else {}
    tree = module_tree(module)
    assignments, problems = _assign(plan, tree)
    for assignment in assignments:
        texts = find_problems(assignment.style, assignment.module, axis.size)
        problems += [f"{_name(assignment.path)}: {text}" for text in texts]
    problems += find_double_claims(assignments)
    problems += find_wrapped(module, assignments)
    problems += find_broken_ties(module, assignments)
    problems += find_cut_heads(tree, assignments, heads, axis)
    problems += find_bad_handovers(tree, assignments)
    if problems:
        raise PlanError(_text(module, problems, axis, call))
    return Resolved(assignments=tuple(assignments), mesh=axis)


def _resolve_style(
    style: Style, module: nn.Module, axis: PlanMesh, call: str
) -> Resolved:
    if not is_style(style):
        raise UsageError(
            "Expect Union[ParallelStyle, Dict[str, ParallelStyle]] for "
            f"parallelize_plan, {type(style)} found!"
        )
    assignment = Assignment(path="", module=module, style=style, pattern="")
    problems = find_problems(style, module, axis.size)
    if problems:
        raise UnsupportedModuleError(f"{call} on the {axis}: {'; '.join(problems)}.")
    problems = find_broken_ties(module, [assignment])
    problems += find_wrapped(module, [assignment])
    if problems:
        raise PlanError(_text(module, problems, axis, call))
    return Resolved(assignments=(assignment,), mesh=axis)


def _assign(
    plan: Mapping[str, Style], tree: dict[str, nn.Module]
) -> tuple[list[Assignment], list[str]]:
    """One assignment for each module that a pattern means, and what is wrong."""
    problems: list[str] = []
    found: dict[int, Assignment] = {}
    for pattern, style in plan.items():
        if not is_style(style):
            problems.append(explain_no_style(pattern, style))
            continue
        paths = match(tree, pattern)
        if not paths:
            problems.append(explain_no_match(tree, pattern))
        for path in paths:
            module = tree[path]
            new = Assignment(path=path, module=module, style=style, pattern=pattern)
            known = found.setdefault(id(module), new)
            if known.style != style:
                problems.append(_conflict(known, new))
    return list(found.values()), problems


def _conflict(first: Assignment, second: Assignment) -> str:
    subject = _name(first.path)
    if first.path != second.path:
        subject += f" (also known as {_name(second.path)})"
    return (
        f"{subject} gets two styles: {first.pattern!r} asks "
        f"{describe_style(first.style)}, {second.pattern!r} asks "
        f"{describe_style(second.style)}; write patterns that do not overlap"
    )


def _name(path: str) -> str:
    return f"'{path}'"


def _text(module: nn.Module, problems: list[str], axis: PlanMesh, call: str) -> str:
    lines = "\n".join(f"  * {problem}" for problem in fold_texts(problems))
    return (
        f"{call}: the plan does not fit {type(module).__name__} on the "
        f"{axis}\n\n{lines}\n\nThe module was not changed. Change these entries of the "
        "plan."
    )
