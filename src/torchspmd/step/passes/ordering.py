"""Passes that say what must have run before them, and leave a report or no trace."""

import contextlib
import functools
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from torchspmd.errors import PassOrderError, PassWarning, UsageError
from torchspmd.step.graph.ledger import graph_size
from torchspmd.step.graph.options import check_module
from torchspmd.step.graph.reports import GraphSize, Outcome, PassReport
from torchspmd.step.graph.snapshot import Snapshot
from torchspmd.step.iterate.iteration import IterGraphModule
from torchspmd.step.iterate.standing import check_regions
from torchspmd.step.legality.check import Proof, check_edit
from torchspmd.step.legality.interfaces import check_definitions

Pass = Callable[..., Any]
# Gives the names of outputs that were not proved, and that it found to be the same.
Observer = Callable[[PassReport, fx.Graph, fx.Graph], Collection[str] | None]


@dataclass(slots=True)
class _History:
    applied: list[str] = field(default_factory=list)
    reports: list[PassReport] = field(default_factory=list)


# Kept by graph, so that compiling a second step in one process starts afresh.
_histories: weakref.WeakKeyDictionary[Any, _History] = weakref.WeakKeyDictionary()
_observers: ContextVar[tuple[Observer, ...]] = ContextVar("observers", default=())
_builds_on: dict[str, frozenset[str]] = {}
_later: dict[str, set[str]] = {}
_harmless: set[str] = set()
_declared: set[Pass] = set()


def graph_optimization_pass(
    prerequisites: Iterable[Pass],
    apply_after: Iterable[Pass],
    *,
    repeatable: bool = True,
    undoes_others: bool = True,
    reorders_collectives: bool = False,
) -> Callable[[Pass], Pass]:
    """Declare a graph pass and its place among others.

    The pass edits ``gm.graph`` and may return an ``Outcome``. Afterwards dead code is
    removed, the edit is checked and code is generated; where any of this fails the graph
    is as it was before. A report is kept for each application (``pass_reports``).

    Args:
        prerequisites: Passes whose result this one builds on. Each must have run on the
            graph, and nothing since may have undone it.
        apply_after: Passes that need not run, but must not run after this one.
        repeatable: Whether it may run again on the same graph.
        undoes_others: Whether it may undo what another pass did; then that one counts as
            not applied, unless this pass builds on it.
        reorders_collectives: Whether it may change the order of collectives on a group.
            All ranks run the same pass, and compare what they will send before they run.

    Example:
        >>> @graph_optimization_pass(prerequisites=[], apply_after=[])
        ... def fuse(gm):
        ...     return Outcome(matched=1, changed=1)
        >>> @graph_optimization_pass(prerequisites=[fuse], apply_after=[])
        ... def split(gm):
        ...     return Outcome(matched=1, changed=1)
        >>> gm = fx.symbolic_trace(lambda x: x + 1)
        >>> report = fuse(gm)
        >>> report.outcome.changed
        1
        >>> report = split(gm)
        >>> applied_passes(gm)
        ('fuse', 'split')
    """
    needed = _keys("prerequisites", prerequisites)
    earlier = _keys("apply_after", apply_after)

    def declare(function: Pass) -> Pass:
        key = _key(function)
        _builds_on[key] = frozenset(needed)
        if not undoes_others:
            _harmless.add(key)
        for other in earlier:
            _later.setdefault(other, set()).add(key)

        @functools.wraps(function)
        def run(gm: Any, *args: Any, **kwargs: Any) -> PassReport:
            check_order(gm, key, repeatable=repeatable)
            edit = functools.partial(function, gm, *args, **kwargs)
            report = _apply(gm, key, edit, reorders_collectives)
            history = _histories.setdefault(gm, _History())
            history.applied.append(key)
            history.reports.append(report)
            return report

        _declared.add(run)
        return run

    return declare


def _apply(gm: Any, key: str, edit: Callable[[], Any], may_reorder: bool) -> PassReport:
    """Run an edit; on any failure the graph is as it was."""
    start = time.perf_counter()
    if not isinstance(gm.graph, fx.Graph):  # a stand-in in a test of the order
        edit()
        return _report(key, Outcome(0, 0), [], None, start)
    snapshot = Snapshot.of(gm)
    try:
        said = edit()
        return _judge(gm, key, snapshot, said, start, may_reorder=may_reorder)
    except BaseException:
        snapshot.restore(gm)
        raise


def _judge(
    gm: Any,
    key: str,
    snapshot: Snapshot,
    said: object,
    start: float,
    *,
    may_reorder: bool,
) -> PassReport:
    """Check an edit since a snapshot, generate code and report."""
    if not check_definitions(gm.graph):  # which are told below; torch only fails
        gm.graph.eliminate_dead_code()
    proof = check_edit(
        snapshot.graph,
        gm.graph,
        snapshot.twins,
        name=_names([key]),
        may_reorder=may_reorder,
        constants=snapshot.constants.changes(gm),
    )
    if isinstance(gm, IterGraphModule):
        check_regions(gm.graph, gm.graph.regions, edit=_names([key]))
    gm.recompile()
    outcome = said if isinstance(said, Outcome) else _measured(snapshot, gm.graph)
    sizes = [graph_size(snapshot.graph), graph_size(gm.graph)]
    report = _report(key, outcome, sizes, proof, start)
    compared: set[str] = set()
    for observer in _observers.get():
        compared.update(observer(report, snapshot.graph, gm.graph) or ())
    if outcome.changed == 0 and not _observers.get():
        warnings.warn(_nothing_changed(report), PassWarning, stacklevel=5)
    if not compared.issuperset(proof.unproved):
        doubt = proof.doubt(report.name, compared)
        warnings.warn(doubt, PassWarning, stacklevel=5)
    return report


def run_any(gm: Any, function: Pass) -> None:
    """Run a pass, or a plain function as if it were declared as one.

    What a plain function edits before, between and behind the passes that it calls is
    checked and reported by its name.
    """
    if _innermost(function) in _declared:
        function(gm)
        return
    before = latest = Snapshot.of(gm)
    own = 0

    def note(_: PassReport, old: fx.Graph, __: fx.Graph) -> None:
        nonlocal latest, own
        own += latest.num_changes(old)
        latest = Snapshot.of(gm)

    history = _histories.setdefault(gm, _History())
    done = len(history.applied)
    start = time.perf_counter()
    try:
        with observing_passes(note):
            said = function(gm)
        own += latest.num_changes(gm.graph) + len(before.constants.changes(gm))
        ran_passes = latest is not before
        if own or not ran_passes:
            key = _key(_innermost(function))
            outcome = said if isinstance(said, Outcome) else Outcome(own, own)
            # The passes that it ran may have put collectives in another order.
            report = _judge(gm, key, before, outcome, start, may_reorder=ran_passes)
            history.applied.append(key)
            history.reports.append(report)
    except BaseException:
        before.restore(gm)
        del history.applied[done:], history.reports[done:]
        raise


def _innermost(function: Pass) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)


def _report(
    key: str,
    outcome: Outcome,
    sizes: list[GraphSize],
    proof: Proof | None,
    start: float,
) -> PassReport:
    before, after = sizes or [GraphSize(0, 0, 0)] * 2
    text, unproved = (
        (str(proof), proof.unproved) if proof is not None else ("not a graph", ())
    )
    seconds = time.perf_counter() - start
    size = len(unproved)
    return PassReport(
        _names([key]), outcome, before, after, text, seconds, size, unproved
    )


def _measured(snapshot: Snapshot, graph: fx.Graph) -> Outcome:
    """How much a pass changed that does not say so itself: nodes new, gone or moved."""
    changed = snapshot.num_changes(graph)
    return Outcome(matched=changed, changed=changed)


def _nothing_changed(report: PassReport) -> str:
    why = "; ".join(report.outcome.refused) or "it found nothing to work on"
    return f"{report.name} changed nothing: {why}."


@contextlib.contextmanager
def observing_passes(observer: Observer) -> Iterator[None]:
    """Call ``observer(report, graph before, graph after)`` for each pass inside.

    It may return the names of outputs that were not proved and that it compared: of these
    nobody is warned.
    Whoever observes has the reports, so a pass that changed nothing does not warn.
    """
    token = _observers.set((*_observers.get(), observer))
    try:
        yield
    finally:
        _observers.reset(token)


def check_order(gm: Any, key: str, *, repeatable: bool = True) -> None:
    """Raise unless a pass may run on a graph now."""
    if not isinstance(gm, (fx.GraphModule, IterGraphModule)):
        raise PassOrderError(
            "The first argument of the pass must be either fx.GraphModule or "
            f"IterGraphModule, not {type(gm).__name__}."
        )
    applied = _histories.get(gm, _History()).applied
    if not repeatable and key in applied:
        raise PassOrderError(
            f"Cannot apply {_names([key])} twice: it was applied to this graph already."
        )
    late = sorted(_later.get(key, set()) & set(applied))
    if late:
        raise PassOrderError(
            f"{_names(late)} must be applied after {_names([key])}. Applied passes are "
            f"{_names(applied)}: apply {_names([key])} first."
        )
    missing = [each for each in sorted(_builds_on[key]) if not _stands(each, applied)]
    if missing:
        raise PassOrderError(
            f"{_names(missing)} are the prerequisites of {_names([key])} but are not "
            f"applied directly before it. Applied passes are {_names(applied) or 'none'}: "
            f"apply {_names(missing)} first."
        )


def applied_passes(gm: Any) -> tuple[str, ...]:
    """The names of the passes that were applied to a graph, in order."""
    return tuple(_names([key]) for key in _histories.get(gm, _History()).applied)


def pass_reports(gm: Any) -> tuple[PassReport, ...]:
    """What each pass did to a graph, in order."""
    check_module("pass_reports", gm=gm)
    return tuple(_histories.get(gm, _History()).reports)


def _stands(needed: str, applied: list[str]) -> bool:
    """Whether a pass was applied and nothing since may have undone it."""
    for key in reversed(applied):
        if key == needed:
            return True
        if needed not in _builds_on.get(key, ()) and key not in _harmless:
            return False
    return False


def _keys(argument: str, given: Any) -> tuple[str, ...]:
    passes = [given]
    if isinstance(given, Iterable) and not isinstance(given, str):
        passes = list(given)
        if all(callable(each) and hasattr(each, "__qualname__") for each in passes):
            return tuple(map(_key, passes))
    shown = ", ".join(getattr(each, "__qualname__", repr(each)) for each in passes)
    raise UsageError(
        f"graph_optimization_pass({argument}=...): {shown} is no list of passes. Pass a "
        "list of functions that graph_optimization_pass declares, such as [fuse], or []."
    )


def _key(function: Pass) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _names(keys: Iterable[str]) -> str:
    return ", ".join(key.rpartition(".")[2] for key in keys)
