"""Plain options of public functions: those of another type are refused by name."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from torch import fx

from torchspmd.errors import UsageError

_MOST_MB = 2**40


def is_whole(value: object) -> bool:
    """Whether a value is a whole number; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_size(value: object) -> bool:
    """Whether a value is a finite number of MiB, not below 0.

    >>> [is_size(value) for value in (25, 0, -1, float("inf"), "25", True)]
    [True, True, False, False, False, False]
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value <= _MOST_MB


def check_integers(what: str, **least: tuple[Any, int | None]) -> None:
    """Refuse arguments that are not whole numbers, or below the least; all at once.

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
    _raise(
        f"{what}({name}={value!r}): pass a whole number"
        f"{'' if low is None else f', at least {low}'}."
        for name, (value, low) in least.items()
        if not is_whole(value) or (low is not None and value < low)
    )


def check_flags(what: str, **flags: object) -> None:
    """Refuse what is neither True nor False: ``"no"`` would count as yes.

    >>> check_flags("run", quick="no")
    Traceback (most recent call last):
        ...
    torchspmd.errors.UsageError: run(quick='no'): pass True or False.
    """
    _check(what, flags, lambda value: isinstance(value, bool), "True or False")


def check_overlap(what: str, overlap_iterations: object) -> None:
    """Refuse what is neither a flag nor ``"auto"``.

    >>> check_overlap("run", "no")
    Traceback (most recent call last):
        ...
    torchspmd.errors.UsageError: run(overlap_iterations='no'): pass True, False or 'auto'.
    """
    given, rule = {"overlap_iterations": overlap_iterations}, "True, False or 'auto'"
    _check(
        what,
        given,
        lambda value: isinstance(value, bool | str) and value in (True, False, "auto"),
        rule,
    )


def check_names(what: str, **names: object) -> None:
    """Refuse what is not a name: nodes are given as text."""
    _check(
        what, names, lambda value: isinstance(value, str), "the name of a node, a str"
    )


def check_node(what: str, **nodes: object) -> None:
    """Refuse what is not a node, such as the name of one.

    >>> check_node("cut", before="mm")
    Traceback (most recent call last):
        ...
    torchspmd.errors.UsageError: cut(before='mm'): pass a node of the graph (fx.Node), as \
find_node gives it.
    """
    rule = "a node of the graph (fx.Node), as find_node gives it"
    _check(what, nodes, lambda value: isinstance(value, fx.Node), rule)


def check_nodes(what: str, **lists: object) -> None:
    """Refuse what is not a collection of nodes, such as a name."""
    for name, value in lists.items():
        items = [value]
        if isinstance(value, Collection) and not isinstance(value, str):
            items = list(value)
        wrong = [each for each in items if not isinstance(each, fx.Node)]
        if wrong:
            kinds = ", ".join(sorted({type(each).__name__ for each in wrong}))
            raise UsageError(
                f"{what}({name}=...): {kinds} where nodes are taken. Pass a list of nodes "
                "of the graph (fx.Node), as find_node gives them."
            )


def check_graph(what: str, **graphs: object) -> None:
    """Refuse what is not an ``fx.Graph``."""
    for name, value in graphs.items():
        if not isinstance(value, fx.Graph):
            raise UsageError(
                f"{what}({name}=...): {type(value).__name__} is no fx.Graph. Pass the "
                "graph of a graph module, for instance step.programs[0].graph.graph."
            )


def check_module(what: str, **modules: object) -> None:
    """Refuse what has no ``fx.Graph``.

    >>> check_module("cut", gm=3)
    Traceback (most recent call last):
        ...
    torchspmd.errors.UsageError: cut(gm=...): int has no fx.Graph. Pass a graph module, \
for instance step.programs[0].graph, or an IterGraphModule.
    """
    for name, value in modules.items():
        if not isinstance(getattr(value, "graph", None), fx.Graph):
            raise UsageError(
                f"{what}({name}=...): {type(value).__name__} has no fx.Graph. Pass a graph "
                "module, for instance step.programs[0].graph, or an IterGraphModule."
            )


def check_budget(
    size_mb: object, what: str, otherwise: str, name: str = "memory_budget_mb"
) -> None:
    """Refuse an amount of memory that is not a number of MiB."""
    if not is_size(size_mb):
        raise UsageError(
            f"{what}({name}={size_mb!r}): use 0 or more, a finite number of MiB, "
            f"{otherwise}."
        )


def check_bucket_size(size_mb: object, what: str) -> None:
    """Refuse the size of a bucket that is neither chosen later nor a number of MiB."""
    if size_mb is not None and (not is_size(size_mb) or size_mb == 0):
        raise UsageError(
            f"{what}(bucket_size_mb={size_mb!r}): use more than 0, a finite number of MiB, "
            "or None to have it chosen."
        )


def _check(
    what: str,
    values: Mapping[str, object],
    is_right: Callable[[object], bool],
    rule: str,
) -> None:
    _raise(
        f"{what}({name}={value!r}): pass {rule}."
        for name, value in values.items()
        if not is_right(value)
    )


def _raise(problems: Iterable[str]) -> None:
    if text := "\n".join(problems):
        raise UsageError(text)
