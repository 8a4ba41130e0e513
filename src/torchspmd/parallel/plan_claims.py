"""Parameters that several names, several styles or a wrapper lay claim to."""

from collections.abc import Sequence

from torch import nn
from torch.distributed.tensor import Placement
from torch.nn.parallel import DistributedDataParallel

from torchspmd.parallel.parameters import describe_broken_tie
from torchspmd.parallel.plan_assignment import Assignment, fused_form, parameter_layouts
from torchspmd.parallel.text_form import describe_style


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
        found = {path: layouts.get(path) for path in _modules_once(model, paths)}
        split = [path for path in found if path in _split_paths(assignments)]
        if split and len(found) > 1:
            problems.append(_split_text(split[0], list(found)))
        elif len(set(found.values())) > 1:
            problems.append(_tie_text(found))
    return problems


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
    fused = (a for a in assignments if fused_form(a) is not None)
    return {path for a in fused for path in parameter_layouts(a) or {}}


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
