"""The one shape that every refusal of a region has: five parts, all problems at once."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from torchspmd.errors import LayoutError, SpmdError
from torchspmd.local.layout import format_mesh


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
