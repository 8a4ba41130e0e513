"""Attention heads: a shard of a projection must hold whole ones."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from torchspmd.parallel.colwise import ColwiseParallel
from torchspmd.parallel.plan_assignment import Assignment, own_twin
from torchspmd.parallel.plan_mesh import PlanMesh
from torchspmd.parallel.plan_names import explain_no_match, match
from torchspmd.parallel.rowwise import RowwiseParallel

# What attention modules call the number of their query heads.
_COUNT_NAMES = ("num_heads", "num_attention_heads", "n_heads", "n_head")


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
        features = _sharded_features(assignment)
        if features is None:
            continue
        heads = known.get(assignment.path) or _heads_of(tree, assignment, features)
        if heads is not None and heads.number:
            is_output = type(own_twin(assignment.style)) is ColwiseParallel
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


def _sharded_features(assignment: Assignment) -> int | None:
    """The features that the style cuts into shards; None where there are none."""
    style, module = own_twin(assignment.style), assignment.module
    if not isinstance(module, nn.Linear):
        return None
    if type(style) is ColwiseParallel:
        return module.out_features
    return module.in_features if type(style) is RowwiseParallel else None


def _heads_of(
    tree: Mapping[str, nn.Module], assignment: Assignment, features: int
) -> _Heads | None:
    parent_path = assignment.path.rpartition(".")[0]
    parent = tree[parent_path] if assignment.path else None
    if parent is None:
        return None
    head_dim = _head_dim(parent)
    if head_dim is None or features % head_dim:
        return None
    return _Heads(features // head_dim, f"head_dim {head_dim} of '{parent_path}'")


def _head_dim(parent: nn.Module) -> int | None:
    value = getattr(parent, "head_dim", None)
    if type(value) is int and value > 0:
        return value
    # Modules that count heads without saying their size say how wide all are together.
    counts = [getattr(parent, name, None) for name in _COUNT_NAMES]
    count = next((c for c in counts if type(c) is int and c > 0), None)
    width = getattr(parent, "hidden_size", getattr(parent, "embed_dim", None))
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
    text = (
        f"'{path}': {heads.number} heads ({features} features, {heads.origin}) cannot be "
        f"shared out whole over {axis.axis}={axis.size}; use an axis of "
        f"{', '.join(fits)} ranks{fix}, or heads={{pattern: 0}} in the Plan if these "
        "are not heads"
    )
    return [text]
