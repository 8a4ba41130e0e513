"""Numbers for virtual ranks, checked before anything runs."""

from collections.abc import Mapping
from typing import Any

from torch import fx

from torchspmd.errors import UsageError


def check_integers(what: str, **least: tuple[Any, int | None]) -> None:
    """Refuse arguments that are no whole numbers, or below the least; all at once.

    Args:
        what: What was called.
        least: Each argument with the least that it may be, None where there is none.

    Example:
        >>> check_integers("run", steps=(0, 1), seed=("a", None))
        Traceback (most recent call last):
            ...
        torchspmd.errors.UsageError: run(steps=0): pass a whole number, at least 1.
        run(seed='a'): pass a whole number.
    """
    problems = []
    for name, (value, low) in least.items():
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or (low is not None and value < low):
            rule = "" if low is None else f", at least {low}"
            problems.append(f"{what}({name}={value!r}): pass a whole number{rule}.")
    if problems:
        raise UsageError("\n".join(problems))


def check_ranks(what: str, ranks: Any) -> None:
    """Refuse what is neither a number of ranks nor one for each axis."""
    if isinstance(ranks, Mapping):
        for axis, size in ranks.items():
            check_integers(what, **{f"ranks[{axis!r}]": (size, 1)})
        return
    check_integers(what, ranks=(ranks, 1))


def check_inputs(what: str, graph: fx.Graph, inputs: Any) -> None:
    """Refuse flat inputs that are not as many as the graph takes."""
    wanted = len(graph.find_nodes(op="placeholder"))
    if inputs is None or callable(inputs):
        return
    found = len(inputs) if isinstance(inputs, (list, tuple)) else None
    if found != wanted:
        shown = type(inputs).__name__ + ("" if found is None else f" of {found}")
        raise UsageError(
            f"{what}(inputs={shown}): the graph takes {wanted} inputs. Pass a list or "
            "tuple with one value for each placeholder, in their order, a function of "
            "step and rank that returns it, or None to have values made up."
        )
