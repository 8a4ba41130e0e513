"""Run a pass: snapshot the graph, edit, check the edit, report; undo all on failure."""

import contextlib
import functools
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchspmd.errors import LegalityError, PassOrderError, PassWarning, UsageError
from torchspmd.step.deferral.iter_graph import IterGraph
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.deferral.regions import check_regions
from torchspmd.step.graph.argument_checks import check_module
from torchspmd.step.graph.collectives import graph_size
from torchspmd.step.graph.metadata import roles_of
from torchspmd.step.graph.nodes import drop_dead_code
from torchspmd.step.graph.reports import GraphSize, Outcome, PassReport
from torchspmd.step.graph.snapshot import (
    Snapshot,
    copy_graph,
    held_by,
    is_held,
    num_changes,
)
from torchspmd.step.legality.check import Proof, check_edit
from torchspmd.step.legality.evaluate import Earlier
from torchspmd.step.progress import phase

Pass = Callable[..., Any]
# Gets each report with the graphs before and after the pass. May give the names of outputs
# that were not proved equal, and that it compared and found equal.
Observer = Callable[[PassReport, fx.Graph, fx.Graph], Collection[str] | None]
# Gets the reports of passes that a failure around them undid, and the restored graph.
Forget = Callable[[Sequence[PassReport], fx.Graph], None]


class LeaveUnchanged(Exception):  # noqa: N818 - nothing failed
    """Raised by a pass whose work is not worth it: its edits are undone.

    Attributes:
        outcome: What the pass reports; ``changed`` is 0.
    """

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class _Rules:
    """The place of a pass among others: the arguments of its declaration."""

    needed: frozenset[str]
    earlier: frozenset[str]
    repeatable: bool
    undoes_others: bool
    reorders_collectives: bool


@dataclass(frozen=True, slots=True)
class _Observing:
    observe: Observer
    forget: Forget | None
    is_quiet: bool


# By module, so that compiling a second step in one process starts afresh: the key and the
# report of each pass that was applied.
_histories: weakref.WeakKeyDictionary[Any, list[tuple[str, PassReport]]] = (
    weakref.WeakKeyDictionary()
)
# Passes are called by user code, so what verifies or dumps graphs cannot be an argument.
# Nor can it be kept by module, as histories are: user code may make a module of its own.
_observers: ContextVar[tuple[_Observing, ...]] = ContextVar("observers", default=())
_rules: dict[str, _Rules] = {}
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
        >>> [each.name for each in pass_reports(gm)]
        ['fuse', 'split']
    """
    rules = _Rules(
        _keys("prerequisites", prerequisites),
        _keys("apply_after", apply_after),
        repeatable,
        undoes_others,
        reorders_collectives,
    )

    def declare(function: Pass) -> Pass:
        key = _key(function)
        _rules[key] = rules

        @functools.wraps(function)
        def run(gm: Any, *args: Any, **kwargs: Any) -> PassReport:
            _check_order(gm, key, rules)
            edit = functools.partial(function, gm, *args, **kwargs)
            return _run(gm, key, edit, rules)

        _declared.add(run)
        return run

    return declare


def _run(gm: Any, key: str, edit: Callable[[], Any], rules: _Rules) -> PassReport:
    """Run a declared pass."""
    start = time.perf_counter()
    if not isinstance(gm.graph, fx.Graph):  # a mock, in a test of the order of passes
        edit()
        size, seconds = GraphSize(0, 0, 0), time.perf_counter() - start
        none = Outcome(0, 0)
        report = PassReport(_name(key), none, size, size, "not a graph", seconds)
        _history(gm).append((key, report))
        return report
    with _undone_on_failure(gm) as snapshot:
        mapping, done = snapshot.mapping, len(_history(gm))
        try:
            said = edit()
        except LeaveUnchanged as left:
            said, mapping = left.outcome, _undo(gm, snapshot, done)
        _check_returned(gm, _name(key), said)
        proof = _check(gm, key, snapshot, mapping, rules.reorders_collectives)
        outcome = said
        if not isinstance(outcome, Outcome):
            num = num_changes(snapshot.graph, gm.graph)
            outcome = Outcome(num, num)
        return _record(gm, key, outcome, proof, snapshot.graph, start)


def run_any(gm: Any, function: Pass) -> None:
    """Run a pass, or a plain function as if it were declared as one.

    What a plain function edits before, between and behind the passes that it calls is
    checked and reported by its name.
    """
    if _innermost(function) in _declared:
        function(gm)
        return
    start, key = time.perf_counter(), _key(_innermost(function))
    with _undone_on_failure(gm) as snapshot:
        between = _Between(snapshot.graph)
        with observing_passes(between.note, between.forget):
            said = function(gm)
        _check_whole(gm, _name(key))
        _check_returned(gm, _name(key), said)
        own = between.num_until(gm.graph) + len(snapshot.constants.changes(gm))
        if own or not between.notes:
            may_reorder = bool(between.notes)  # the passes that it ran may have done so
            proof = _check(gm, key, snapshot, snapshot.mapping, may_reorder)
            outcome = said if isinstance(said, Outcome) else Outcome(own, own)
            _record(gm, key, outcome, proof, snapshot.graph, start)


def run_transformation(gm: fx.GraphModule, function: Pass) -> Any:
    """Call the user's transformation of a captured graph; what it returns.

    What it edits outside of the passes that it calls is checked and reported by its name,
    in whatever graph module it returns. Dead code is left, and any order of collectives
    is taken: ranks compare it before they run.
    """
    start, before = time.perf_counter(), Snapshot.of(gm)
    between = _Between(before.graph)
    with observing_passes(between.note, between.forget, is_quiet=False):
        made = function(gm)
    if not isinstance(made, (fx.GraphModule, IterGraphModule)):
        return made
    key = _key(_innermost(function))
    name = f"compile(gm_transformation={_name(key)})"
    _check_whole(made, name)
    constants = before.constants.changes(made)
    own = between.num_until(made.graph) + len(constants)
    is_edited = own and (constants or num_changes(before.graph, made.graph))
    if not is_edited and roles_of(before.graph) == roles_of(made.graph):
        return made
    edited, mapping = before.map_nodes(made.graph)
    proof = check_edit(
        before.graph, edited, mapping, name=name, may_reorder=True, constants=constants
    )
    outcome = Outcome(own or 1, own or 1)
    _record(made, key, outcome, proof, before.graph, start, seen=between.latest)
    return made


@contextlib.contextmanager
def _undone_on_failure(gm: Any) -> Iterator[Snapshot]:
    """Give a snapshot; after a failure inside, graph and history are as they were."""
    snapshot, done = _take_snapshot(gm), len(_history(gm))
    try:
        yield snapshot
    except BaseException:
        _undo(gm, snapshot, done)
        raise


def _take_snapshot(gm: Any) -> Snapshot:
    """A snapshot, which shares the copy of the one before where nothing changed."""
    if not isinstance(gm, IterGraphModule):
        return Snapshot.of(gm)
    gm.latest_snapshot = Snapshot.of(gm, gm.latest_snapshot)
    return gm.latest_snapshot


def _undo(gm: Any, snapshot: Snapshot, done: int) -> dict[fx.Node, fx.Node]:
    """Restore a graph, forget all passes but the first ones; which node is which."""
    history = _history(gm)
    undone = [report for _, report in history[done:]]
    del history[done:]
    for each in _observers.get():
        if undone and each.forget is not None:
            each.forget(undone, snapshot.graph)
    return snapshot.restore(gm)


def _check(
    gm: Any,
    key: str,
    snapshot: Snapshot,
    mapping: Mapping[fx.Node, fx.Node],
    may_reorder: bool,
) -> Proof:
    """Remove dead code, check an edit since a snapshot, and generate code."""
    name = _name(key)
    _check_whole(gm, name)
    drop_dead_code(gm.graph)
    with phase("proofs"):
        proof = check_edit(
            snapshot.graph,
            gm.graph,
            mapping,
            name=name,
            may_reorder=may_reorder,
            constants=snapshot.constants.changes(gm),
            earlier=_earlier_values(gm, snapshot),
        )
        if isinstance(gm, IterGraphModule):
            if proof.values is not None:
                gm.latest_values = held_by(gm.graph), proof.values
            check_regions(gm.graph, gm.graph.regions, edit=name)
    gm.recompile()
    return proof


def _earlier_values(gm: Any, snapshot: Snapshot) -> Earlier | None:
    """What the last proof found of the graph that a snapshot was taken of.

    Nothing where the graph was edited between that proof and the snapshot.
    """
    if not isinstance(gm, IterGraphModule) or gm.latest_values is None:
        return None
    held, values = gm.latest_values
    if len(held) != len(snapshot.held) or not is_held(held, snapshot.held):
        return None
    copied = {copy: node for node, copy in snapshot.mapping.items()}
    return Earlier(values, copied, copied.keys())


def _record(
    gm: Any,
    key: str,
    outcome: Outcome,
    proof: Proof,
    before: fx.Graph,
    start: float,
    *,
    seen: fx.Graph | None = None,
) -> PassReport:
    """Report an edit: to observers, by a warning where needed, and in the history.

    Args:
        gm: What was edited.
        key: The edit.
        outcome: What it says of itself.
        proof: What was checked.
        before: The graph before.
        start: When it began.
        seen: The last graph that observers know, where that is another one.
    """
    report = PassReport(
        _name(key),
        outcome,
        graph_size(before),
        graph_size(gm.graph),
        str(proof),
        time.perf_counter() - start,
        len(proof.unproved),
        proof.unproved,
    )
    compared: set[str] = set()
    for each in _observers.get():
        compared.update(each.observe(report, seen or before, gm.graph) or ())
    is_quiet = any(each.is_quiet for each in _observers.get())
    if outcome.changed == 0 and not is_quiet:
        why = _first_of(outcome.refused) or "it found nothing to work on"
        warnings.warn(f"{report.name} changed nothing: {why}.", PassWarning, 4)
    if not compared.issuperset(proof.unproved):
        warnings.warn(proof.doubt(report.name, compared), PassWarning, 4)
    _history(gm).append((key, report))
    return report


_SHOWN = 4  # reasons in one warning; the report has all


def _first_of(reasons: Sequence[str]) -> str:
    rest = len(reasons) - _SHOWN
    more = [f"and {rest} more (see the report)"] if rest > 0 else []
    return "; ".join([*reasons[:_SHOWN], *more])


@contextlib.contextmanager
def observing_passes(
    observer: Observer, forget: Forget | None = None, *, is_quiet: bool = True
) -> Iterator[None]:
    """Call ``observer(report, graph before, graph after)`` for each pass inside.

    It may return the names of outputs that were not proved and that it compared: there is
    no warning for these.

    Args:
        observer: What is called.
        forget: Where a pass or function around passes fails, gets the reports of these
            and the graph that the module has again.
        is_quiet: The observer shows the reports, so a pass that changed nothing does not
            warn.
    """
    mine = _Observing(observer, forget, is_quiet)
    token = _observers.set((*_observers.get(), mine))
    try:
        yield
    finally:
        _observers.reset(token)


def pass_reports(gm: Any) -> tuple[PassReport, ...]:
    """What each pass did to a graph, in order.

    >>> pass_reports(fx.symbolic_trace(lambda x: x + 1))
    ()
    """
    check_module("pass_reports", gm=gm)
    return tuple(report for _, report in _histories.get(gm, ()))


def _history(gm: Any) -> list[tuple[str, PassReport]]:
    return _histories.setdefault(gm, [])


# ----------------------------------------------------------------------------
# Edits between passes.


@dataclass(frozen=True, slots=True)
class _Note:
    """A pass that ran, and how often the graph was changed between others and it."""

    report: PassReport
    before: fx.Graph
    num_changes: int


class _Between:
    """Counts what is edited between passes, by how each finds and leaves the graph.

    Attributes:
        latest: A copy of what the last pass left.
        notes: The passes that ran and were not undone.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.latest = graph
        self.notes: list[_Note] = []

    def note(self, report: PassReport, before: fx.Graph, after: fx.Graph) -> None:
        """Count what was edited up to a pass that ran."""
        num = num_changes(self.latest, before)
        self.notes.append(_Note(report, self.latest, num))
        self.latest, _ = copy_graph(after)

    def forget(self, undone: Sequence[PassReport], _: fx.Graph) -> None:
        """Count anew from where the first of these passes began."""
        gone = set(map(id, undone))
        places = [n for n, each in enumerate(self.notes) if id(each.report) in gone]
        if places:
            self.latest = self.notes[places[0]].before
            del self.notes[places[0] :]

    def num_until(self, graph: fx.Graph) -> int:
        """How many changes no pass made, up to a graph."""
        made = sum(each.num_changes for each in self.notes)
        return made + num_changes(self.latest, graph)


# ----------------------------------------------------------------------------
# What is refused: modules that cannot be compared, and passes in the wrong order.

_GRAPH = (
    "graph: main_gm is no longer a graph module with marks on what is moved. A pass edits "
    "the graph that it finds, or sets gm.graph; it sets neither main_gm nor main_gm.graph"
)
_OUTPUT = (
    "output: the graph does not end with an output node. A pass keeps the outputs, all and "
    "in their order: the caller unpacks them"
)


def _check_whole(gm: Any, name: str) -> None:
    """Raise where an edit left nothing that could be compared with what was there."""
    problem = ""
    if isinstance(gm, IterGraphModule):
        is_marked = isinstance(getattr(gm.main_gm, "graph", None), IterGraph)
        problem = "" if is_marked else _GRAPH
    if not problem:
        last = next(iter(reversed(gm.graph.nodes)), None)
        problem = _OUTPUT if last is None or last.op != "output" else ""
    if problem:
        raise LegalityError(
            f"{name} would change what the graph computes, and was not taken; 1 problem:\n"
            f"  {problem}."
        )


def _check_returned(gm: Any, name: str, said: object) -> None:
    """Warn of a module that a pass returns and that is not used."""
    is_module = isinstance(said, (fx.GraphModule, IterGraphModule))
    if is_module and said is not gm and said is not getattr(gm, "main_gm", gm):
        warnings.warn(
            f"{name} returned another module than it got, which is ignored. A pass edits "
            "the module that it is called with, or raises.",
            PassWarning,
            stacklevel=4,
        )


def _check_order(gm: Any, key: str, rules: _Rules) -> None:
    """Raise unless a pass may run on a graph now."""
    if not isinstance(gm, (fx.GraphModule, IterGraphModule)):
        raise PassOrderError(
            "The first argument of the pass must be either fx.GraphModule or "
            f"IterGraphModule, not {type(gm).__name__}."
        )
    name, applied = _name(key), [each for each, _ in _histories.get(gm, ())]
    if not rules.repeatable and key in applied:
        raise PassOrderError(
            f"Cannot apply {name} twice: it was applied to this graph already."
        )
    late = {each for each in applied if each in _rules and key in _rules[each].earlier}
    if late:
        raise PassOrderError(
            f"{_names(sorted(late))} must be applied after {name}. Applied passes are "
            f"{_names(applied)}: apply {name} first."
        )
    missing = [each for each in sorted(rules.needed) if not _is_valid(each, applied)]
    if missing:
        raise PassOrderError(
            f"{_names(missing)} are the prerequisites of {name} but are not "
            f"applied directly before it. Applied passes are {_names(applied) or 'none'}: "
            f"apply {_names(missing)} first."
        )


def _is_valid(needed: str, applied: Sequence[str]) -> bool:
    """Whether a pass was applied and nothing since may have undone it."""
    for key in reversed(applied):
        if key == needed:
            return True
        rules = _rules.get(key)  # plain functions have none
        if rules is None or (rules.undoes_others and needed not in rules.needed):
            return False
    return False


def _keys(argument: str, given: Any) -> frozenset[str]:
    passes = [given]
    if isinstance(given, Iterable) and not isinstance(given, str):
        passes = list(given)
        if all(callable(each) and hasattr(each, "__qualname__") for each in passes):
            return frozenset(map(_key, passes))
    shown = ", ".join(getattr(each, "__qualname__", repr(each)) for each in passes)
    raise UsageError(
        f"graph_optimization_pass({argument}=...): {shown} is no list of passes. Pass a "
        "list of functions that graph_optimization_pass declares, such as [fuse], or []."
    )


def _innermost(function: Pass) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function if hasattr(function, "__qualname__") else type(function)


def _key(function: Pass) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _name(key: str) -> str:
    return key.rpartition(".")[2]


def _names(keys: Iterable[str]) -> str:
    return ", ".join(map(_name, keys))
