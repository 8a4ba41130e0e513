"""``compile(verify=True)``: graphs before and after each pass, run and compared."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx

from torchspmd.errors import (
    PassWarning,
    UsageError,
    VerificationError,
    VirtualRanksError,
)
from torchspmd.step.graph.reports import ORDERS, PassReport
from torchspmd.step.graph.snapshot import copy_graph
from torchspmd.step.iterate.iter_graph import IterGraph
from torchspmd.step.passes.ordering import observing_passes
from torchspmd.step.virtual.axes import RankLayout, lay_out
from torchspmd.step.virtual.bisection import (
    FirstDifference,
    find_first_difference,
    output_name,
)
from torchspmd.step.virtual.certificate import EQUAL, Check, describe_claim
from torchspmd.step.virtual.comparison import Pair, Trace, furthest, settled
from torchspmd.step.virtual.differences import digest, is_vacuous
from torchspmd.step.virtual.inputs import Inputs
from torchspmd.step.virtual.options import Verification, too_large
from torchspmd.step.virtual.pipelined import (
    Digests,
    differing_outputs,
    digests_of,
    is_pipelined,
    run_pipelined,
)
from torchspmd.step.virtual.ranks import VirtualRanks, Watcher
from torchspmd.step.virtual.run import next_inputs, with_state

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
