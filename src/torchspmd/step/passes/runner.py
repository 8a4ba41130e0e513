"""Passes that say what must have run before them, and leave a report or no trace."""

import contextlib
import functools
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from torchspmd.errors import LegalityError, PassOrderError, PassWarning, UsageError
from torchspmd.step.deferral.iter_graph import IterGraph
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.deferral.regions import check_regions
from torchspmd.step.graph.collectives import graph_size
from torchspmd.step.graph.metadata import roles_of
from torchspmd.step.graph.options import check_module
from torchspmd.step.graph.reports import GraphSize, Outcome, PassReport
from torchspmd.step.graph.snapshot import Snapshot, copy_graph, num_changes
from torchspmd.step.legality.check import Proof, check_edit
from torchspmd.step.legality.graph_rules import check_definitions

# ----------------------------------------------------------------------------
# What happens around passes: edits between them, and modules that cannot be judged.

_GRAPH = (
    "graph: main_gm is no longer a graph module with marks on what is moved. A pass edits "
    "the graph that it finds, or sets gm.graph; it sets neither main_gm nor main_gm.graph"
)
_OUTPUT = (
    "output: the graph does not end with an output node. A pass keeps the outputs, all and "
    "in their order: the caller unpacks them"
)


@dataclass(frozen=True, slots=True)
class _Note:
    """A pass that ran: what it was called on is the graph before with so many changes."""

    report: PassReport
    before: fx.Graph
    num_changes: int


class Outside:
    """Counts what is edited between passes, by how each finds and leaves the graph.

    Attributes:
        latest: A copy of what the last pass left.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.latest = graph
        self._notes: list[_Note] = []

    @property
    def ran_passes(self) -> bool:
        """Whether a pass ran, and was not undone."""
        return bool(self._notes)

    def note(self, report: PassReport, before: fx.Graph, after: fx.Graph) -> None:
        """Count what was edited up to a pass that ran."""
        num = num_changes(self.latest, before)
        self._notes.append(_Note(report, self.latest, num))
        self.latest, _ = copy_graph(after)

    def forget(self, undone: Sequence[PassReport], _: fx.Graph) -> None:
        """Count anew from where the first of these passes began."""
        gone = set(map(id, undone))
        places = [n for n, each in enumerate(self._notes) if id(each.report) in gone]
        if places:
            self.latest = self._notes[places[0]].before
            del self._notes[places[0] :]

    def num_until(self, graph: fx.Graph) -> int:
        """How many changes no pass made, up to a graph."""
        made = sum(each.num_changes for each in self._notes)
        return made + num_changes(self.latest, graph)


def check_whole(gm: Any, name: str) -> None:
    """Raise where an edit left nothing that could be compared with what was there.

    >>> gm = fx.symbolic_trace(lambda x: x + 1)
    >>> gm.graph.erase_node(gm.graph.output_node())
    >>> check_whole(gm, "cut")
    Traceback (most recent call last):
    torchspmd.errors.LegalityError: cut would change what the graph computes, and was not...
    """
    problem = ""
    if isinstance(gm, IterGraphModule) and not _has_marks(gm.main_gm):
        problem = _GRAPH
    else:
        last = next(iter(reversed(gm.graph.nodes)), None)
        problem = _OUTPUT if last is None or last.op != "output" else ""
    if problem:
        raise LegalityError(
            f"{name} would change what the graph computes, and was not taken; 1 problem:\n"
            f"  {problem}."
        )


def _has_marks(main: object) -> bool:
    return isinstance(getattr(main, "graph", None), IterGraph)


def check_returned(gm: Any, name: str, said: object) -> None:
    """Warn of a module that a pass returns and nobody takes."""
    is_module = isinstance(said, (fx.GraphModule, IterGraphModule))
    if is_module and said is not gm and said is not getattr(gm, "main_gm", gm):
        warnings.warn(
            f"{name} returned another module than it got, which is ignored. A pass edits "
            "the module that it is called with, or raises.",
            PassWarning,
            stacklevel=5,
        )


Pass = Callable[..., Any]
# Gives the names of outputs that were not proved, and that it found to be the same.
Observer = Callable[[PassReport, fx.Graph, fx.Graph], Collection[str] | None]
# Gets the reports of passes that a failure around them undid, and the graph that is back.
Forget = Callable[[Sequence[PassReport], fx.Graph], None]


@dataclass(slots=True)
class _History:
    applied: list[str] = field(default_factory=list)
    reports: list[PassReport] = field(default_factory=list)

    def add(self, key: str, report: PassReport) -> None:
        self.applied.append(key)
        self.reports.append(report)

    def cut(self, length: int) -> list[PassReport]:
        """Drop what came behind so many passes; the reports of that."""
        gone = self.reports[length:]
        del self.applied[length:], self.reports[length:]
        return gone


@dataclass(frozen=True, slots=True)
class _Observing:
    observe: Observer
    forget: Forget | None
    is_quiet: bool


# Kept by graph, so that compiling a second step in one process starts afresh.
_histories: weakref.WeakKeyDictionary[Any, _History] = weakref.WeakKeyDictionary()
_observers: ContextVar[tuple["_Observing", ...]] = ContextVar("observers", default=())
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
            _histories.setdefault(gm, _History()).add(key, report)
            return report

        _declared.add(run)
        return run

    return declare


def _apply(gm: Any, key: str, edit: Callable[[], Any], may_reorder: bool) -> PassReport:
    """Run an edit; on any failure the graph and its history are as they were."""
    start = time.perf_counter()
    if not isinstance(gm.graph, fx.Graph):  # a stand-in in a test of the order
        edit()
        return _report(key, Outcome(0, 0), [], None, start)
    done = len(_histories.setdefault(gm, _History()).applied)
    snapshot = Snapshot.of(gm)
    try:
        said = edit()
        check_returned(gm, _names([key]), said)
        return _judge(gm, key, snapshot, said, start, may_reorder=may_reorder)
    except BaseException:
        _undo(gm, snapshot, done)
        raise


def _undo(gm: Any, snapshot: Snapshot, done: int) -> None:
    """Put a graph back, and forget the passes that ran on it behind so many others."""
    undone = _histories.setdefault(gm, _History()).cut(done)
    for each in _observers.get():
        if undone and each.forget is not None:
            each.forget(undone, snapshot.graph)
    snapshot.restore(gm)


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
    check_whole(gm, _names([key]))
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
    _tell(report, proof, snapshot.graph, gm.graph)
    return report


def _tell(report: PassReport, proof: Proof, before: fx.Graph, after: fx.Graph) -> None:
    """Show an edit to whoever observes, and warn of what nobody knows then."""
    compared: set[str] = set()
    for each in _observers.get():
        compared.update(each.observe(report, before, after) or ())
    is_quiet = any(each.is_quiet for each in _observers.get())
    if report.outcome.changed == 0 and not is_quiet:
        warnings.warn(_nothing_changed(report), PassWarning, stacklevel=6)
    if not compared.issuperset(proof.unproved):
        doubt = proof.doubt(report.name, compared)
        warnings.warn(doubt, PassWarning, stacklevel=6)


def run_any(gm: Any, function: Pass) -> None:
    """Run a pass, or a plain function as if it were declared as one.

    What a plain function edits before, between and behind the passes that it calls is
    checked and reported by its name.
    """
    if _innermost(function) in _declared:
        function(gm)
        return
    before = Snapshot.of(gm)
    history = _histories.setdefault(gm, _History())
    done = len(history.applied)
    key = _key(_innermost(function))
    start = time.perf_counter()
    try:
        outside = Outside(before.graph)
        with observing_passes(outside.note, outside.forget):
            said = function(gm)
        check_whole(gm, _names([key]))
        check_returned(gm, _names([key]), said)
        own = outside.num_until(gm.graph) + len(before.constants.changes(gm))
        if own or not outside.ran_passes:
            outcome = said if isinstance(said, Outcome) else Outcome(own, own)
            # The passes that it ran may have put collectives in another order.
            may_reorder = outside.ran_passes
            report = _judge(gm, key, before, outcome, start, may_reorder=may_reorder)
            history.add(key, report)
    except BaseException:
        _undo(gm, before, done)
        raise


def run_transformation(gm: fx.GraphModule, function: Pass) -> Any:
    """Call the user's transformation of a captured graph; what it returns.

    What it edits outside of the passes that it calls is checked and reported by its name,
    in whatever graph module it returns. Dead code is left, and any order of collectives
    is taken: ranks compare it before they run.
    """
    before = Snapshot.of(gm)
    outside = Outside(before.graph)
    start = time.perf_counter()
    with observing_passes(outside.note, outside.forget, is_quiet=False):
        made = function(gm)
    if not isinstance(made, (fx.GraphModule, IterGraphModule)):
        return made
    key = _key(_innermost(function))
    name = f"compile(gm_transformation={_names([key])})"
    check_whole(made, name)
    constants = before.constants.changes(made)
    own = outside.num_until(made.graph) + len(constants)
    is_edited = own and (constants or num_changes(before.graph, made.graph))
    if not is_edited and roles_of(before.graph) == roles_of(made.graph):
        return made
    edited, twins = before.find_twins(made.graph)
    proof = check_edit(
        before.graph, edited, twins, name=name, may_reorder=True, constants=constants
    )
    sizes = [graph_size(before.graph), graph_size(made.graph)]
    report = _report(key, Outcome(own or 1, own or 1), sizes, proof, start)
    _tell(report, proof, outside.latest, made.graph)
    _histories.setdefault(made, _History()).add(key, report)
    return made


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
    changed = num_changes(snapshot.graph, graph)
    return Outcome(matched=changed, changed=changed)


def _nothing_changed(report: PassReport) -> str:
    why = "; ".join(report.outcome.refused) or "it found nothing to work on"
    return f"{report.name} changed nothing: {why}."


@contextlib.contextmanager
def observing_passes(
    observer: Observer, forget: Forget | None = None, *, is_quiet: bool = True
) -> Iterator[None]:
    """Call ``observer(report, graph before, graph after)`` for each pass inside.

    It may return the names of outputs that were not proved and that it compared: of these
    nobody is warned.

    Args:
        observer: What is called.
        forget: Where a pass or function around passes fails, gets the reports of these
            and the graph that the module has again.
        is_quiet: Whoever observes shows the reports, so a pass that changed nothing does
            not warn.
    """
    mine = _Observing(observer, forget, is_quiet)
    token = _observers.set((*_observers.get(), mine))
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
