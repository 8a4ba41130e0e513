"""Layouts as users write them: per argument, nested like the arguments, or a prefix.

Everything here works on values and tree paths; nothing communicates.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from torchspmd.comm import format_count
from torchspmd.errors import LayoutError, SpmdError
from torchspmd.layout.names import format_mesh
from torchspmd.layout.placements import (
    Layout,
    format_layout,
    format_placement,
    shard_dim,
)

# A tree of layouts; None is for "as it is" or "not a tensor".
Spec: TypeAlias = Any
Path: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """What a user wrote for one leaf.

    Attributes:
        layout: The layout; None for "as it is".
        where: The place in the spec that holds it, as in ``[1]['k']``.
        is_exact: It was written for this very leaf, not for a tree above it.
    """

    layout: Layout | None
    where: str = ""
    is_exact: bool = False


class SpecMismatchError(Exception):
    """A spec does not mirror its tree; the text is one bullet of a message."""


def is_layout(spec: Spec) -> bool:
    """Whether a spec is one layout: a list or tuple of placements.

    >>> from torch.distributed.tensor import Partial, Shard
    >>> is_layout([Shard(0), Partial()]), is_layout(([Shard(0)], None))
    (True, False)
    """
    return (
        isinstance(spec, Sequence)
        and not isinstance(spec, str)
        and len(spec) > 0
        and all(isinstance(entry, Placement) for entry in spec)
    )


def find_written(spec: Spec, path: Path, name: str) -> Written:
    """What a spec says about the leaf at a path: the first layout or None on the way.

    >>> from torch.distributed.tensor import Shard
    >>> spec = {"q": [Shard(1)], "kv": None}
    >>> find_written(spec, ("kv", 0), "in_placements").layout is None
    True
    """
    entry, depth = find_entry(spec, path, name, is_layout)
    where = f"{name}{format_path(path[:depth])}"
    if entry is None:
        return Written(None, where)
    return Written(tuple(entry), where, is_exact=depth == len(path))


def find_entry(
    spec: Spec, path: Path, name: str, is_end: Callable[[Spec], bool]
) -> tuple[Spec, int]:
    """The first None or end of a spec on the way down a path, and how deep it is."""
    for depth, step in enumerate((*path, None)):
        where = f"{name}{format_path(path[:depth])}"
        if spec is None or is_end(spec):
            return spec, depth
        if depth == len(path):
            break
        spec = _step_down(spec, step, where)
    raise SpecMismatchError(f"{where} is {_kind(spec)}, but one tensor is there")


def _step_down(spec: Spec, step: Any, where: str) -> Spec:
    if isinstance(spec, Placement):
        raise SpecMismatchError(f"{where} is {format_placement(spec)}: {_IN_A_LIST}")
    if isinstance(spec, Mapping):
        if step not in spec:
            raise SpecMismatchError(f"{where} has no entry for {step!r}")
        return spec[step]
    if isinstance(step, str) and hasattr(spec, step):
        return getattr(spec, step)
    if not isinstance(spec, (list, tuple)) or not isinstance(step, int):
        raise SpecMismatchError(f"{where} is {_kind(spec)} and has no {step!r}")
    if step >= len(spec):
        entries = format_count(len(spec), "entry", "entries")
        raise SpecMismatchError(f"{where} has {entries}, none for number {step}")
    return spec[step]


_IN_A_LIST = (
    "a layout is a list with one placement for each mesh axis, as in [Shard(0)]"
)


def leftover_entries(spec: Spec, paths: list[Path], name: str) -> list[str]:
    """The entries of a spec that no leaf used, as text; a typo must not pass unseen."""
    if not isinstance(spec, (list, tuple, dict)):
        return []
    return [
        f"{name}{format_path(end)} = {format_spec(entry)}: there is nothing at that place"
        for end, entry in list_ends(spec)
        if not any(path[: len(end)] == end for path in paths)
    ]


def list_ends(spec: Spec, path: Path = ()) -> Iterator[tuple[Path, Spec]]:
    """Every end of a spec (a layout, None, or whatever else is there) and its path."""
    if spec is None or is_layout(spec) or not isinstance(spec, (list, tuple, dict)):
        yield path, spec
        return
    if hasattr(spec, "_fields"):
        children: Any = zip(spec._fields, spec, strict=True)
    else:
        children = spec.items() if isinstance(spec, dict) else enumerate(spec)
    for step, child in children:
        yield from list_ends(child, (*path, step))


def layout_problem(layout: Layout, num_axes: int, ndim: int | None) -> str | None:
    """Why a layout cannot be that of a tensor of ``ndim`` dims; None where it can."""
    if len(layout) != num_axes:
        entries = format_count(len(layout), "entry", "entries")
        axes = format_count(num_axes, "axis", "axes")
        return f"{format_layout(layout)} has {entries} for {axes}"
    for entry in layout:
        dim = shard_dim(entry)
        if dim is not None and ndim is not None and not -ndim <= dim < ndim:
            return (
                f"{format_layout(layout)} shards dim {dim} of a tensor of {ndim} dims"
            )
    return None


def format_spec(spec: Spec) -> str:
    """One entry of a spec as text, whatever it is."""
    if spec is None:
        return "None"
    return format_layout(spec) if is_layout(spec) else _kind(spec)


def _kind(spec: Spec) -> str:
    if isinstance(spec, Placement):
        return format_placement(spec)
    length = f" of {len(spec)}" if isinstance(spec, (list, tuple, dict)) else ""
    return f"a {type(spec).__name__}{length}"


def format_path(path: Path) -> str:
    """Steps as they are written in code.

    >>> format_path((1, "k"))
    "[1]['k']"
    """
    return "".join(f"[{step!r}]" for step in path)


# ----------------------------------------------------------------------------
# The one shape that every refusal of a region has: five parts, all problems at once.


@dataclass(frozen=True, slots=True)
class Problem:
    """One failing leaf and the change that cures it."""

    text: str
    change: str


def build_message(
    function: str,
    mesh: DeviceMesh | None,
    what: str,
    problems: Sequence[Problem],
    rule: str,
) -> str:
    """Call and function, mesh, a bullet for each leaf, the rule, the changes.

    >>> print(build_message("attend", None, "layouts do not match",
    ...                     [Problem("args[0] 'q': ...", "Write ...")], "They must."))
    local_map on 'attend': layouts do not match
    <BLANKLINE>
      * args[0] 'q': ...
    <BLANKLINE>
    They must.
    Write ...
    """
    place = f" (mesh {format_mesh(mesh)})" if mesh is not None else ""
    bullets = "\n".join(f"  * {problem.text}" for problem in problems)
    changes = "\n".join(dict.fromkeys(problem.change for problem in problems))
    return f"local_map on {function!r}: {what}{place}\n\n{bullets}\n\n{rule}\n{changes}"


def refuse(
    function: str,
    mesh: DeviceMesh | None,
    what: str,
    problems: Sequence[Problem],
    rule: str,
    error: type[SpmdError] = LayoutError,
) -> None:
    """Raise one error for all problems of a call; does nothing when there are none."""
    if problems:
        raise error(build_message(function, mesh, what, problems, rule)) from None
