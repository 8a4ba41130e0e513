"""Passes that say what must have run before them."""

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from torchspmd.errors import PassOrderError
from torchspmd.step.iteration import IterGraphModule

Pass = Callable[..., Any]

# What was applied to each graph, in order: kept by graph, so that compiling a second
# step in one process starts afresh.
_applied: weakref.WeakKeyDictionary[Any, list[str]] = weakref.WeakKeyDictionary()


def graph_optimization_pass(
    prerequisites: Iterable[Pass], apply_after: Iterable[Pass]
) -> Callable[[Pass], Pass]:
    """Declare a graph pass and its place among others.

    Args:
        prerequisites: Passes whose result this one builds on. Each must have run on the
            graph, and no pass that does not itself build on it may have run since: that
            one may have undone it.
        apply_after: Passes that need not run, but must not run after this one.

    After the pass the graph is checked, dead code is removed and code is generated.

    Example:
        >>> @graph_optimization_pass(prerequisites=[], apply_after=[])
        ... def fuse(gm):
        ...     pass
        >>> @graph_optimization_pass(prerequisites=[fuse], apply_after=[])
        ... def split(gm):
        ...     pass
        >>> gm = fx.symbolic_trace(lambda x: x + 1)
        >>> fuse(gm)
        >>> split(gm)
        >>> applied_passes(gm)
        ('fuse', 'split')
    """
    needed = tuple(_key(each) for each in prerequisites)
    earlier = tuple(_key(each) for each in apply_after)

    def declare(function: Pass) -> Pass:
        key = _key(function)
        _builds_on[key] = frozenset(needed)
        for other in earlier:
            _later.setdefault(other, set()).add(key)

        @functools.wraps(function)
        def run(gm: Any, *args: Any, **kwargs: Any) -> Any:
            check_order(gm, key)
            result = function(gm, *args, **kwargs)
            gm.graph.lint()
            gm.graph.eliminate_dead_code()
            gm.recompile()
            _applied.setdefault(gm, []).append(key)
            return result

        return run

    return declare


_builds_on: dict[str, frozenset[str]] = {}
_later: dict[str, set[str]] = {}


def check_order(gm: Any, key: str) -> None:
    """Raise unless a pass may run on a graph now."""
    if not isinstance(gm, (fx.GraphModule, IterGraphModule)):
        raise PassOrderError(
            "The first argument of the pass must be either fx.GraphModule or "
            f"IterGraphModule, not {type(gm).__name__}."
        )
    history = _applied.get(gm, [])
    late = sorted(_later.get(key, set()) & set(history))
    if late:
        raise PassOrderError(
            f"{_names(late)} must be applied after {_names([key])}. Applied passes are "
            f"{_names(history)}: apply {_names([key])} first."
        )
    missing = [each for each in sorted(_builds_on[key]) if not _stands(each, history)]
    if missing:
        raise PassOrderError(
            f"{_names(missing)} are the prerequisites of {_names([key])} but are not "
            f"applied directly before it. Applied passes are {_names(history) or 'none'}: "
            f"apply {_names(missing)} first."
        )


def applied_passes(gm: Any) -> tuple[str, ...]:
    """The names of the passes that were applied to a graph, in order."""
    return tuple(key.rpartition(".")[2] for key in _applied.get(gm, []))


def _stands(needed: str, history: list[str]) -> bool:
    """Whether a pass was applied and nothing since may have undone it."""
    for key in reversed(history):
        if key == needed:
            return True
        if needed not in _builds_on[key]:
            return False
    return False


def _key(function: Pass) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _names(keys: Iterable[str]) -> str:
    return ", ".join(key.rpartition(".")[2] for key in keys)
