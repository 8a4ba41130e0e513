"""From a plan and a model to one style for each module, or every reason why not.

Nothing here changes the model. Names that match nothing are explained in ``names``,
neighbours whose layouts do not match in ``neighbours``.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from torch.distributed.tensor import Placement
from torch.nn.parallel import DistributedDataParallel

from torchspmd.errors import PlanError, UnsupportedModuleError, UsageError
from torchspmd.parallel.axis import MeshLike, PlanMesh, describe_mesh_axis
from torchspmd.parallel.experts import ReplicateParallel
from torchspmd.parallel.fused import FusedColwiseParallel
from torchspmd.parallel.linear import ColwiseParallel, RowwiseParallel, linear_form
from torchspmd.parallel.parameters import describe_broken_tie
from torchspmd.parallel.plan.assignment import (
    Assignment,
    find_problems,
    own_style,
    parameter_layouts,
)
from torchspmd.parallel.plan.names import (
    explain_no_match,
    fold_texts,
    match,
    module_tree,
    shortest_patterns,
)
from torchspmd.parallel.plan.neighbours import find_mismatched_neighbours
from torchspmd.parallel.plan.plan import Plan, Style, explain_no_style, is_style
from torchspmd.parallel.plan.text_form import describe_style

# ----------------------------------------------------------------------------
# Parameters that several names, several styles or a wrapper lay claim to.


def find_double_claims(assignments: Sequence[Assignment]) -> list[str]:
    """Parameters that a module's style and that of a module inside it both lay out."""
    owners: dict[str, Assignment] = {}
    pairs: dict[tuple[str, str], str] = {}
    for assignment in assignments:
        for path in parameter_layouts(assignment) or {}:
            owner = owners.setdefault(path, assignment)
            if owner is not assignment:
                outer, inner = sorted((owner, assignment), key=lambda a: len(a.path))
                pairs[outer.path, inner.path] = (
                    f"'{path}' would be laid out twice: by {describe_style(outer.style)} "
                    f"of '{outer.path}' and by {describe_style(inner.style)} of "
                    f"'{inner.path}'; give a style to one of them"
                )
    return list(pairs.values())


def find_wrapped(model: nn.Module, assignments: Sequence[Assignment]) -> list[str]:
    """Parameters that DistributedDataParallel has already, and would lose sight of."""
    wrappers = [
        part for part in model.modules() if isinstance(part, DistributedDataParallel)
    ]
    wrapped = {id(part) for wrapper in wrappers for part in wrapper.modules()}
    return [
        f"'{assignment.path}' is inside of a DistributedDataParallel, which reduces the "
        "gradients of the parameters that it was given, not of those that replace them; "
        "call parallelize_module first and wrap the result"
        for assignment in assignments
        if any(id(part) in wrapped for part in assignment.module.modules())
        and parameter_layouts(assignment) != {}
    ]


def find_broken_ties(model: nn.Module, assignments: Sequence[Assignment]) -> list[str]:
    """Parameters with two names that would not stay one parameter."""
    problems = _find_earlier_ties(model, assignments)
    names: dict[int, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(path)
    shared = [paths for paths in names.values() if len(paths) > 1]
    if not shared:
        return problems
    layouts, unknown = _all_layouts(assignments)
    for paths in shared:
        # A module that sits in two places is placed once and serves both names.
        if any(path.startswith(unknown) for path in paths):
            continue
        placed = {path.rpartition(".")[0] for path in paths if path in layouts}
        found = {
            path: layouts.get(path)
            for path in _modules_once(model, paths)
            if path in layouts or not is_alias(path, placed)
        }
        split = [path for path in found if path in _split_paths(assignments)]
        if split and len(found) > 1:
            problems.append(_split_text(split[0], list(found)))
        elif len(set(found.values())) > 1:
            problems.append(_tie_text(found))
    return problems


def is_alias(path: str, owners: Collection[str]) -> bool:
    """Whether a module only keeps a parameter that a module inside of it computes with.

    So BERT's head has its decoder's bias under a name of its own.
    """
    outer = path.rpartition(".")[0]
    return any(owner != outer and owner.startswith(f"{outer}.") for owner in owners)


def _find_earlier_ties(
    model: nn.Module, assignments: Sequence[Assignment]
) -> list[str]:
    """Parameters that an earlier call has laid out otherwise, for a module tied to this."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    layouts, _ = _all_layouts(assignments)
    split = _split_paths(assignments)
    texts = {
        path: describe_broken_tie(parameters[path], None if path in split else layout)
        for path, layout in layouts.items()
        if path in parameters
    }
    return [f"'{path}': {text}" for path, text in texts.items() if text]


def _split_paths(assignments: Sequence[Assignment]) -> set[str]:
    """Parameters that a style replaces by several."""
    return {
        assignment.parameter_path(name)
        for assignment in assignments
        if (style := own_style(assignment.style)) is not None
        for name, cut in style.parameter_cuts(assignment.module, 1).items()
        if cut[0].size is not None
    }


def _split_text(path: str, paths: list[str]) -> str:
    others = ", ".join(f"'{other}'" for other in paths if other != path)
    return (
        f"one parameter would become several: '{path}' is split into parts, but is also "
        f"{others}; untie them first"
    )


def _all_layouts(
    assignments: Sequence[Assignment],
) -> tuple[dict[str, Placement], tuple[str, ...]]:
    layouts: dict[str, Placement] = {}
    unknown = []
    for assignment in assignments:
        known = parameter_layouts(assignment)
        if known is None:
            unknown.append(f"{assignment.path}." if assignment.path else "")
        layouts.update(known or {})
    return layouts, tuple(unknown)


def _modules_once(model: nn.Module, paths: list[str]) -> list[str]:
    """One path for each module that holds the parameter."""
    owners: dict[int, str] = {}
    for path in paths:
        owners.setdefault(id(model.get_submodule(path.rpartition(".")[0])), path)
    return list(owners.values())


def _tie_text(layouts: dict[str, Placement | None]) -> str:
    listed = ", ".join(
        f"'{path}' {repr(layout) if layout else 'with no style'}"
        for path, layout in layouts.items()
    )
    return (
        f"one parameter would become several: {listed}; give the modules that share it "
        "styles with the same layout (RowwiseParallel for an embedding table goes with "
        "ColwiseParallel for a Linear), or untie them first"
    )


# ----------------------------------------------------------------------------
# Attention heads: a shard of a projection must hold whole ones.

# What attention modules call the number of their query heads.
_COUNT_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_WIDTH_NAMES = ("hidden_size", "embed_dim", "n_embd")


class _Heads(NamedTuple):
    number: int
    origin: str


def find_cut_heads(
    tree: Mapping[str, nn.Module],
    assignments: Sequence[Assignment],
    explicit: Mapping[str, int],
    axis: PlanMesh,
) -> list[str]:
    """Projections whose heads the ranks of the axis cannot share out whole.

    The number of heads is what the plan says, else what the module around the
    projection says: its features divided by ``head_dim``.
    """
    problems, known = _explicit_heads(tree, explicit)
    for assignment in assignments:
        for features in _sharded_features(assignment):
            heads = known.get(assignment.path) or _heads_of(tree, assignment, features)
            if heads is not None and heads.number:
                is_output = type(own_style(assignment.style)) is ColwiseParallel
                problems += _check(assignment.path, features, heads, axis, is_output)
    return problems


def _explicit_heads(
    tree: Mapping[str, nn.Module], explicit: Mapping[str, int]
) -> tuple[list[str], dict[str, _Heads]]:
    problems = []
    known: dict[str, _Heads] = {}
    for pattern, count in explicit.items():
        paths = match(tree, pattern)
        if not paths:
            problems.append(f"heads: {explain_no_match(tree, pattern)}")
        known |= dict.fromkeys(paths, _Heads(count, f"heads[{pattern!r}] of the plan"))
    return problems, known


def _sharded_features(assignment: Assignment) -> tuple[int, ...]:
    """The features that the style cuts into shards, each set by itself."""
    style, form = own_style(assignment.style), linear_form(assignment.module)
    if isinstance(style, FusedColwiseParallel) and style.num_heads is None:
        return style.parts
    if form is not None and type(style) is ColwiseParallel:
        return (form.outside,)
    if form is not None and type(style) is RowwiseParallel:
        return (form.inside,)
    return ()


def _heads_of(
    tree: Mapping[str, nn.Module], assignment: Assignment, features: int
) -> _Heads | None:
    parent_path = assignment.path.rpartition(".")[0]
    parent = tree[parent_path] if assignment.path else None
    if parent is None:
        return None
    head_dim = head_size(parent)
    if head_dim is None or features % head_dim:
        return None
    return _Heads(features // head_dim, f"head_dim {head_dim} of '{parent_path}'")


def head_size(parent: nn.Module) -> int | None:
    """The features of one head, where an attention module tells."""
    value = getattr(parent, "head_dim", None)
    if type(value) is int and value > 0:
        return value
    # Modules that count heads without saying their size say how wide all are together.
    counts = [getattr(parent, name, None) for name in _COUNT_NAMES]
    count = next((c for c in counts if type(c) is int and c > 0), None)
    widths = [getattr(parent, name, None) for name in _WIDTH_NAMES]
    width = next((w for w in widths if type(w) is int and w > 0), None)
    if count is None or type(width) is not int or width % count:
        return None
    return width // count


def _check(
    path: str, features: int, heads: _Heads, axis: PlanMesh, is_output: bool
) -> list[str]:
    if heads.number % axis.size == 0:
        return []
    fix = ""
    if is_output and heads.number < axis.size and axis.size % heads.number == 0:
        # The style for this: ranks share a head.
        style = f"KeyValueParallel(num_heads={heads.number})"
        fix = f", or {style} if these are keys or values of an attention of your own"
    fits = [str(n) for n in range(1, heads.number + 1) if heads.number % n == 0]
    return [
        f"'{path}': {heads.number} heads ({features} features, {heads.origin}) cannot be "
        f"shared out whole over {axis.axis}={axis.size}; use an axis of "
        f"{', '.join(fits)} ranks{fix}, or heads={{pattern: 0}} in the Plan if these "
        "are not heads"
    ]


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
    problems += find_mismatched_neighbours(tree, assignments)
    if problems:
        raise PlanError(_text(module, problems, axis, call))
    return Resolved(assignments=tuple(assignments), mesh=axis)


def other_layers(plan: Mapping[str, Style], model: nn.Module) -> dict[str, Style]:
    """``ReplicateParallel`` for each layer with trained parameters that has no style."""
    call = "Plan.replicate_others"
    assignments = resolve(plan, model, {"tp": 1}, call=call).assignments
    styled = {id(part) for a in assignments for part in a.module.modules()}
    found: dict[str, Style] = {}
    problems = []
    for path, module in model.named_modules():
        own = [n for n, p in module.named_parameters(recurse=False) if p.requires_grad]
        if not own or id(module) in styled:
            continue
        if next(module.children(), None) is None and path:
            found[path] = ReplicateParallel()
        else:
            problems.append(
                f"{_name(path)} ({type(module).__name__}) has parameters of its own "
                f"({', '.join(own)}) beside the layers inside of it; give it a style, or "
                "move them into a module of their own"
            )
    if problems:
        raise PlanError(_text(model, problems, describe_mesh_axis({"tp": 1}), call))
    return shortest_patterns(module_tree(model), found)


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
