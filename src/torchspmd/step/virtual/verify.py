"""``compile(verify=True)``: graphs before and after each pass, run and compared."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, final

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import format_bytes
from torchspmd.errors import (
    PassWarning,
    UsageError,
    VerificationError,
    VirtualRanksError,
)
from torchspmd.step.deferral.forms import Stage, creates_state, derive
from torchspmd.step.deferral.iter_graph import IterGraph
from torchspmd.step.deferral.module import Marks
from torchspmd.step.graph.metadata import output_values
from torchspmd.step.graph.options import check_integers
from torchspmd.step.graph.reports import ORDERS, PassReport
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.passes.runner import observing_passes
from torchspmd.step.virtual.certificate import EQUAL, Check, describe_claim
from torchspmd.step.virtual.collectives import Started
from torchspmd.step.virtual.compare import (
    FirstDifference,
    Pair,
    Trace,
    digest,
    find_first_difference,
    furthest,
    is_vacuous,
    output_name,
    settled,
)
from torchspmd.step.virtual.inputs import Inputs
from torchspmd.step.virtual.ranks import RankLayout, VirtualRanks, Watcher, lay_out
from torchspmd.step.virtual.run import next_inputs, with_state

# ----------------------------------------------------------------------------
# Whether a run with work moved to the next iteration gives what a plain run gives.

Digests = list[list[str]]  # by rank and output
InputsOf = Callable[[int], list[list[Any]]]  # step -> by rank and placeholder


def is_pipelined(graph: fx.Graph) -> bool:
    """Whether a graph is run in several forms."""
    return (
        isinstance(graph, IterGraph)
        and bool(graph.regions)
        and not creates_state(graph)
    )


def run_pipelined(
    ranks: VirtualRanks,
    graph: IterGraph,
    inputs: InputsOf,
    steps: int,
    constants: object,
    running: Mapping[str, fx.Graph] | None = None,
) -> Iterator[Digests]:
    """What each step gives: a first one, steady ones and a last one.

    Args:
        ranks: The virtual ranks.
        graph: One iteration and its marks.
        inputs: What each step takes.
        steps: How many.
        constants: The module that holds the constants of the graphs.
        running: What is run in the place of derived graphs, by form.
    """
    pipeline = derive(graph, graph.regions)
    names = ["first", *["steady"] * (steps - 2), "last"]
    carried: list[list[Any]] = [[] for _ in range(ranks.size)]
    state: list[list[Any]] | None = None
    for step, name in enumerate(names):
        form: Stage = getattr(pipeline, name)
        run = (running or {}).get(name, form.graph)
        given = inputs(step)
        given = given if state is None else with_state(graph, given, state)
        taken = [[*own, *left] for own, left in zip(given, carried, strict=True)]
        # Work that is left for the next step may be on its way.
        values = ranks.run(run, taken, constants=constants, keep_started=True)
        outputs = [_placed(form, row, pipeline.num_outputs) for row in values]
        carried = [row[len(form.outputs) :] for row in values]
        state = next_inputs(graph, given, outputs)
        yield digests_of(outputs)  # now: a later step may write into them


def digests_of(outputs: list[list[Any]]) -> Digests:
    """What is compared of the outputs of a step."""
    return [list(map(digest, row)) for row in outputs]


def without_marks(graph: fx.Graph, marks: Marks) -> fx.Graph:
    """A copy that does not tell how far it has come: only real steps are asked that."""
    copy, _ = copy_graph(graph)
    for node in list(copy.nodes):
        if node.target in (marks.begin, marks.end):
            copy.erase_node(node)
    return copy


def differing_outputs(
    graph: IterGraph, plain: Sequence[Digests], pipelined: Sequence[Digests]
) -> list[int]:
    """Outputs with other bits; what was moved comes a step later, except at the end."""
    moved = {name for region in graph.regions for name in region.nodes}
    is_late = [
        isinstance(value, fx.Node) and value.name in moved
        for value in output_values(graph)
    ]
    last = len(plain) - 1
    found = set()
    for step, ranks in enumerate(pipelined):
        for rank, outputs in enumerate(ranks):
            for index, value in enumerate(outputs):
                from_step = step - 1 if is_late[index] and step < last else step
                if from_step < 0:
                    continue
                if value != plain[from_step][rank][index]:
                    found.add(index)
    return sorted(found)


def _placed(form: Stage, values: list[Any], num_outputs: int) -> list[Any]:
    outputs: list[Any] = [None] * num_outputs
    for place, value in zip(form.outputs, values, strict=False):
        if isinstance(value, Started) and not value.is_done:
            raise VirtualRanksError(
                f"virtual ranks: output {place} is a result that nobody has waited for."
            )
        outputs[place] = value.value if isinstance(value, Started) else value
    return outputs


# ----------------------------------------------------------------------------
# How much ``compile(verify=...)`` runs, and what is too much.


@final
@dataclass(frozen=True, slots=True)
class Verification:
    """How ``compile(verify=...)`` compares graphs.

    Args:
        ranks: Virtual ranks along each axis whose size the graph leaves open, at least 4:
            a sum of two or three terms shows too few of the orders.
        steps: How many steps, state carried over.
        max_ranks: The most virtual ranks. A ring is run on as many ranks as the real group
            has, since passes lay buckets out for these; above, it is not run and the
            certificate says so.
        limit_bytes: The most that inputs and outputs of all virtual ranks may take; above,
            nothing is compared and the certificate says so.
        seed: For the batches of the other ranks, and random operators.

    Example:
        >>> Verification(ranks=8)
        Verification(ranks=8, steps=2, max_ranks=32, limit_bytes=4294967296, seed=0)
    """

    ranks: int = 4
    steps: int = 2
    max_ranks: int = 32
    limit_bytes: int = 4 << 30
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"max_ranks": 1, "limit_bytes": 1}
        whole = {
            field.name: (getattr(self, field.name), least.get(field.name))
            for field in fields(self)
        }
        check_integers("Verification", **whole)
        if self.ranks < 4 or self.steps < 1:
            raise UsageError(
                f"Verification(ranks={self.ranks}, steps={self.steps}): take at least 4 "
                "ranks, since fewer do not show the order of a sum, and one step."
            )


def too_large(graph: fx.Graph, layout: RankLayout, options: Verification) -> str:
    """Why these virtual ranks are too many or too much; empty when they are not."""
    if layout.size > options.max_ranks:
        return (
            f"{layout} are more than {options.max_ranks}: raise max_ranks of "
            "verify=Verification(...), or verify on a smaller mesh."
        )
    values = [*graph.find_nodes(op="placeholder"), *output_values(graph)]
    total = layout.size * sum(_bytes(value) for value in values)
    if total > options.limit_bytes:
        return (
            f"inputs and outputs of {layout} take {format_bytes(total)}, above the limit "
            f"of {format_bytes(options.limit_bytes)}: raise limit_bytes of "
            "verify=Verification(...), or verify a smaller model."
        )
    return ""


def _bytes(node: object) -> int:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return 0
    return _torch.size_hint(value.numel()) * value.element_size()


_ADVICE = (
    "Leave the edit out, or correct it. A pass that may change bits says so with "
    "Outcome(keeps_bits=()); one that keeps them under some orders lists those."
)


class Verifier:
    """Compares each graph of a program with the one before it.

    Args:
        name: The step and its program, for messages.
        captured: The graph as it was captured.
        call: The flat inputs of the call that it was captured for.
        options: How to compare.

    Attributes:
        reports: What each pass said, in order.
        checks: What was compared.
        refusal: Why nothing could be compared; empty when it could.
        layouts: The virtual ranks, by order of reductions.
        skipped: Orders that were not run, and why.
    """

    def __init__(
        self,
        name: str,
        captured: fx.GraphModule,
        call: Sequence[Any],
        options: Verification,
    ) -> None:
        self._name, self._options, self._call = name, options, call
        self._module: object = captured
        self.refusal = ""
        self.reports: list[PassReport] = []
        self.checks: list[Check] = []
        self._current, _ = copy_graph(captured.graph)
        self._known: dict[str, Trace] = {}
        self.layouts: dict[str, RankLayout] = {}
        self.skipped: dict[str, str] = {}
        self._inputs: dict[str, Inputs] = {}
        try:
            self._lay_out(captured.graph)
            self._known["rank"] = self._trace(self._current, "rank")
        except VirtualRanksError as error:
            self._refuse(error)

    def _refuse(self, error: VirtualRanksError) -> None:
        self.refusal = str(error)
        warnings.warn(
            f"compile(verify=True) on {self._name}: graphs are not compared. {error}",
            PassWarning,
            stacklevel=7,
        )

    def _lay_out(self, graph: fx.Graph) -> None:
        options = self._options
        for order in ORDERS:
            layout = lay_out(graph, options.ranks)
            if not layout.groups:
                layout = lay_out(graph, 1)
            elif order == "ring":
                sizes = {
                    each.label: each.real_size or each.size for each in layout.axes
                }
                layout = lay_out(graph, sizes)
            problem = too_large(graph, layout, options)
            if problem and order == "rank":
                raise VirtualRanksError(problem)
            if problem:
                self.skipped[order] = problem
                continue
            self.layouts[order] = layout
            self._inputs[order] = Inputs(graph, layout, self._call, options.seed)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Compare the graphs of every pass that runs inside."""
        with observing_passes(self.observe, self.forget):
            yield

    def forget(self, undone: Sequence[PassReport], graph: fx.Graph) -> None:
        """Go on from the graph that is back after these passes were undone."""
        gone = set(map(id, undone))
        self.reports = [each for each in self.reports if id(each) not in gone]
        self._current, self._known = copy_graph(graph)[0], {}

    def observe(
        self, report: PassReport, before: fx.Graph, after: fx.Graph
    ) -> tuple[str, ...]:
        """Compare the graphs before and after a pass.

        Returns:
            The outputs that were not proved, and have equal bits.
        """
        self.reports.append(report)
        self.compare(before, "an edit outside of the passes")
        claim, done = report.outcome.keeps_bits, len(self.checks)
        self.compare(after, f"pass {report.name}", claim or (), claim != (), report)
        return next((check.settled for check in self.checks[done:]), ())

    def compare(
        self,
        graph: fx.Graph,
        what: str,
        orders: Sequence[str] = (),
        strict: bool = True,
        report: PassReport | None = None,
    ) -> None:
        """Compare a graph with the one before it; that is what the next is compared to.

        Args:
            graph: The edited graph.
            what: The edit.
            orders: Orders under which bits must be kept, besides that of the ranks.
            strict: Whether other bits are an error, or a line in the certificate.
            report: Of the pass that made the edit.
        """
        if self.refusal or _same_nodes(self._current, graph):
            return
        self._fit(graph)
        if self.refusal:
            return
        known = {}
        if not self.layouts["rank"].groups:
            orders = ()  # nothing is reduced
        for order in dict.fromkeys(("rank", *orders)):
            if order in self.skipped:
                continue
            before = self._known.get(order) or self._trace(self._current, order)
            known[order] = after = self._run_edited(graph, order, what)
            self._judge(Pair(graph, what, order, before, after), strict, report)
        self._module = graph.owning_module or self._module
        self._current, _ = copy_graph(graph)
        self._known = known

    def _fit(self, graph: fx.Graph) -> None:
        """Lay ranks out anew where an edit ties a graph to a number of them."""
        try:
            if not _fits(graph, self.layouts["rank"]):
                self._known, self.skipped = {}, {}
                self._lay_out(graph)
        except VirtualRanksError as error:
            self._refuse(error)

    def compare_pipelined(
        self, graph: fx.Graph, running: Mapping[str, fx.Graph] | None = None
    ) -> None:
        """Compare the forms of a graph whose work runs a step later with plain steps.

        Args:
            graph: One iteration, with marks on what is moved.
            running: The graphs that write in place and are run, by form.
        """
        if self.refusal or not is_pipelined(graph):
            return
        assert isinstance(graph, IterGraph)
        steps = max(4, self._options.steps)  # the second steady one has both before it
        plain = [digests_of(each) for each in self.run(graph, "rank", steps=steps)]
        what = f"work moved to the next iteration (regions: {len(graph.regions)})"
        self._compare_forms(graph, plain, {}, what)
        if running:
            what += f", {' and '.join(running)} form in place"
            self._compare_forms(graph, plain, running, what)

    def _compare_forms(
        self,
        graph: IterGraph,
        plain: list[Digests],
        running: Mapping[str, fx.Graph],
        what: str,
    ) -> None:
        steps, layout = len(plain), self.layouts["rank"]
        ranks, given = self._ranks("rank"), partial(self._inputs_of, "rank")
        try:
            forms = [*run_pipelined(ranks, graph, given, steps, self._module, running)]
        except (VirtualRanksError, UsageError) as error:
            raise VerificationError(_not_run(self._name, what, error)) from error
        differing = differing_outputs(graph, plain, forms)
        if differing:
            names = ", ".join(output_name(graph, n) for n in differing[:6])
            raise VerificationError(
                f"compile(verify=True) on {self._name}: {what} changed what {steps} steps "
                f"compute ({layout}): {len(differing)} outputs differ: {names}. "
                "Leave the move out."
            )
        checked = len(plain[0][0])
        self.checks.append(Check(what, str(layout), "rank", steps, checked, EQUAL))

    def _ranks(self, order: str) -> VirtualRanks:
        return VirtualRanks(self.layouts[order], order=order, seed=self._options.seed)

    def _inputs_of(self, order: str, step: int) -> list[list[Any]]:
        size = self.layouts[order].size
        return [self._inputs[order].at(step, rank) for rank in range(size)]

    def _judge(self, pair: Pair, strict: bool, report: PassReport | None) -> None:
        differing = pair.differing()
        if differing and strict:
            raise VerificationError(self._explain(pair, differing, report))
        old, new = self.run(self._current, pair.order), self.run(pair.graph, pair.order)
        gap = furthest(old, new, differing) if differing else 0.0
        check = pair.check(differing, str(self.layouts[pair.order]), gap)
        known = settled(self._current, pair, differing, report)
        self.checks.append(replace(check, settled=known))

    def _run_edited(self, graph: fx.Graph, order: str, what: str) -> Trace:
        try:
            return self._trace(graph, order)
        except (VirtualRanksError, UsageError) as error:
            raise VerificationError(_not_run(self._name, what, error)) from error

    def _trace(self, graph: fx.Graph, order: str) -> Trace:
        trace = Trace([], ())
        empty: set[int] | None = None
        for results in self.run(graph, order):
            trace.digests.append([list(map(digest, row)) for row in results])
            found = {n for n, v in enumerate(results[0]) if is_vacuous(v)}
            empty = found if empty is None else empty & found
        return Trace(trace.digests, tuple(sorted(empty or ())))

    def run(
        self,
        graph: fx.Graph,
        order: str,
        watch: Callable[[int], Watcher] | None = None,
        steps: int | None = None,
    ) -> Iterator[list[list[Any]]]:
        """The outputs of each rank, step by step; random numbers start afresh."""
        ranks = self._ranks(order)
        state: list[list[Any]] | None = None
        for step in range(steps or self._options.steps):
            given = self._inputs_of(order, step)
            given = given if state is None else with_state(graph, given, state)
            told = None if watch is None else watch(step)
            results = ranks.run(graph, given, constants=self._module, watch=told)
            yield results
            state = next_inputs(graph, given, results)

    def _explain(
        self, pair: Pair, differing: list[int], report: PassReport | None
    ) -> str:
        def run(graph: fx.Graph, watch: Callable[[int], Watcher]) -> None:
            for _ in self.run(graph, pair.order, watch):
                pass

        found = find_first_difference(self._current, pair.graph, run)
        lines = [
            f"compile(verify=True) on {self._name}: {pair.what} changed what the step "
            "computes.",
            "",
            f"  {self.layouts[pair.order]}, reduction order {pair.order}",
            *_lines_of(found),
            *pair.told(differing),
            "",
        ]
        if report is not None:
            lines.append(f"{report.name} {describe_claim(report)}.")
        return "\n".join([*lines, _ADVICE])


def _not_run(name: str, what: str, error: Exception) -> str:
    return (
        f"compile(verify=True) on {name}: after {what} the graph cannot be "
        f"run, before it could.\n\n  {error}\n\nLeave the edit out, or correct it."
    )


def _fits(graph: fx.Graph, layout: RankLayout) -> bool:
    """Whether a graph can run on these ranks.

    One that gathers has the shapes of as many ranks as it is made for.
    """
    known = {axis.label: axis.size for axis in layout.axes}
    fixed = [axis for axis in lay_out(graph).axes if axis.is_fixed]
    return all(known.get(axis.label, axis.size) == axis.size for axis in fixed)


def _lines_of(found: FirstDifference | None) -> list[str]:
    if found is None:
        return ["  no node that is in both graphs differs: outputs were exchanged"]
    lines = [
        f"  first node that differs: {found.node} ({found.where}), step {found.step}, "
        f"rank {found.rank}"
    ]
    if found.added:
        names = ", ".join(found.added[:6]) + (", ..." if len(found.added) > 6 else "")
        lines.append(f"    computed from nodes that were added: {names}")
    if found.relaid:
        lines.append(f"    the same bits, but other strides: {found.relaid}")
    return lines + [f"    {line}" for line in str(found.difference).splitlines()]


def _same_nodes(left: fx.Graph, right: fx.Graph) -> bool:
    def facts(graph: fx.Graph) -> list[tuple[str, str, str, str]]:
        return [
            (node.name, str(node.target), str(node.args), str(node.kwargs))
            for node in graph.nodes
        ]

    return facts(left) == facts(right)
