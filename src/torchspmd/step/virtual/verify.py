"""``compile(verify=True)``: graphs before and after each pass, run and compared."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
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
from torchspmd.step.deferral.iter_graph import IterGraph
from torchspmd.step.graph.argument_checks import check_integers
from torchspmd.step.graph.metadata import output_values
from torchspmd.step.graph.reports import ORDERS, PassReport
from torchspmd.step.graph.snapshot import copy_graph, num_changes
from torchspmd.step.legality.edit import output_name
from torchspmd.step.passes.runner import observing_passes
from torchspmd.step.virtual.certificate import EQUAL, Certificate, Check, describe_claim
from torchspmd.step.virtual.compare import (
    Digests,
    Trace,
    digests_of,
    find_first_difference,
    furthest,
    name_outputs,
)
from torchspmd.step.virtual.ranks import RankLayout, VirtualRanks, lay_out
from torchspmd.step.virtual.run import (
    Inputs,
    InputSource,
    StepWatcher,
    is_pipelined,
    run_pipelined,
    run_steps,
)


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

    def too_large(self, graph: fx.Graph, layout: RankLayout) -> str:
        """Why these virtual ranks are too many or too much; empty when they are not."""
        if layout.size > self.max_ranks:
            return (
                f"{layout} are more than {self.max_ranks}: raise max_ranks of "
                "verify=Verification(...), or verify on a smaller mesh."
            )
        values = [*graph.find_nodes(op="placeholder"), *output_values(graph)]
        total = layout.size * sum(_bytes(value) for value in values)
        if total > self.limit_bytes:
            return (
                f"inputs and outputs of {layout} take {format_bytes(total)}, above the "
                f"limit of {format_bytes(self.limit_bytes)}: raise limit_bytes of "
                "verify=Verification(...), or verify a smaller model."
            )
        return ""


def _bytes(node: object) -> int:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return _torch.size_hint(value.nbytes) if isinstance(value, torch.Tensor) else 0


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
        self._known: dict[str, Trace] = {}  # of the current graph, by order
        self.layouts: dict[str, RankLayout] = {}
        self.skipped: dict[str, str] = {}
        self._inputs: dict[str, InputSource] = {}
        try:
            self._lay_out(captured.graph)
            self._known["rank"] = self._trace(self._current, "rank")
        except VirtualRanksError as error:
            self._refuse(error)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Compare the graphs of every pass that runs inside."""
        with observing_passes(self.observe, self.forget):
            yield

    def observe(
        self, report: PassReport, before: fx.Graph, after: fx.Graph
    ) -> tuple[str, ...]:
        """Compare the graphs before and after a pass.

        Returns:
            The outputs that were not proved, and have equal bits.
        """
        self.reports.append(report)
        self.compare(before, "an edit outside of the passes")
        done = len(self.checks)
        self.compare(after, f"pass {report.name}", report)
        return next((check.settled for check in self.checks[done:]), ())

    def forget(self, undone: Sequence[PassReport], graph: fx.Graph) -> None:
        """Go on from the graph that is back after these passes were undone."""
        self._current, self._known = copy_graph(graph)[0], {}
        gone = set(map(id, undone))
        self.reports = [each for each in self.reports if id(each) not in gone]

    def compare(
        self, graph: fx.Graph, what: str, report: PassReport | None = None
    ) -> None:
        """Compare a graph with the one before it; that is what the next is compared to.

        Args:
            graph: The edited graph.
            what: The edit.
            report: Of the pass that made the edit. It may say under which orders of
                reductions bits are kept, besides that of the ranks, or that they may
                change: then other bits are a line in the certificate, and no error.
        """
        claim = None if report is None else report.outcome.keeps_bits
        if self.refusal or not num_changes(self._current, graph):
            return
        try:
            if not _fits(graph, self.layouts["rank"]):
                self._known, self.skipped = {}, {}
                self._lay_out(graph)
        except VirtualRanksError as error:
            self._refuse(error)
            return
        is_reducing = bool(self.layouts["rank"].groups)
        orders = claim if claim and is_reducing else ()
        known = {}
        for order in dict.fromkeys(("rank", *orders)):
            if order in self.skipped:
                continue
            before = self._known.get(order) or self._trace(self._current, order)
            with self._running(what):
                known[order] = self._trace(graph, order)
            differing = before.differing(known[order])
            if differing and claim != ():
                text = self._explain(graph, what, order, differing, report)
                raise VerificationError(text)
            traces = before, known[order]
            self.checks.append(self._check(graph, what, order, *traces, report))
        self._module = graph.owning_module or self._module
        self._current, _ = copy_graph(graph)
        self._known = known

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
        assert isinstance(graph, IterGraph), type(graph)
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
        steps, layout, inputs = len(plain), self.layouts["rank"], self._inputs["rank"]
        ranks = self._ranks("rank")
        with self._running(what):
            done = run_pipelined(ranks, graph, inputs, steps, self._module, running)
            forms = list(map(digests_of, done))
        differing = _differing_outputs(graph, plain, forms)
        if differing:
            raise VerificationError(
                f"compile(verify=True) on {self._name}: {what} changed what {steps} steps "
                f"compute ({layout}): {len(differing)} outputs differ: "
                f"{name_outputs(graph, differing)}. Leave the move out."
            )
        checked = len(plain[0][0])
        self.checks.append(Check(what, str(layout), "rank", steps, checked, EQUAL))

    def run(
        self,
        graph: fx.Graph,
        order: str,
        watch: StepWatcher | None = None,
        steps: int | None = None,
    ) -> Iterator[list[list[Any]]]:
        """The outputs of each rank, step by step; random numbers start afresh."""
        done = run_steps(
            self._ranks(order),
            graph,
            self._inputs[order],
            steps or self._options.steps,
            constants=self._module,
            watch=watch,
        )
        return (step.results for step in done)

    def _trace(self, graph: fx.Graph, order: str) -> Trace:
        return Trace.of(self.run(graph, order))

    def _ranks(self, order: str) -> VirtualRanks:
        return VirtualRanks(self.layouts[order], order=order, seed=self._options.seed)

    def _lay_out(self, graph: fx.Graph) -> None:
        options = self._options
        for order in ORDERS:
            layout = lay_out(graph, options.ranks)
            if not layout.groups:
                layout = lay_out(graph, 1)
            elif order == "ring":
                axes = layout.axes
                sizes = {each.label: each.real_size or each.size for each in axes}
                layout = lay_out(graph, sizes)
            problem = options.too_large(graph, layout)
            if problem and order == "rank":
                raise VirtualRanksError(problem)
            if problem:
                self.skipped[order] = problem
                continue
            self.layouts[order] = layout
            self._inputs[order] = Inputs(graph, layout, self._call, options.seed).at

    def _refuse(self, error: VirtualRanksError) -> None:
        self.refusal = str(error)
        warnings.warn(
            f"compile(verify=True) on {self._name}: graphs are not compared. {error}",
            PassWarning,
            stacklevel=7,
        )

    @contextmanager
    def _running(self, what: str) -> Iterator[None]:
        """A graph that cannot run inside is the fault of the edit."""
        try:
            yield
        except (VirtualRanksError, UsageError) as error:
            raise VerificationError(
                f"compile(verify=True) on {self._name}: after {what} the graph cannot be "
                f"run, before it could.\n\n  {error}\n\nLeave the edit out, or correct it."
            ) from error

    def _check(
        self,
        graph: fx.Graph,
        what: str,
        order: str,
        before: Trace,
        after: Trace,
        report: PassReport | None,
    ) -> Check:
        """What was compared and how it came out."""
        result, differing = EQUAL, before.differing(after)
        num_outputs = len(after.digests[0][0])
        if differing:
            runs = self.run(self._current, order), self.run(graph, order)
            result = (
                f"other bits in {len(differing)} outputs "
                f"({name_outputs(graph, differing, 3)}), at most "
                f"{furthest(*runs, differing):.2g} of the largest entry apart"
            )
        # Unproved outputs that have the same bits, and show something.
        unproved = report.unproved_names if report else ()
        silent = {*differing, *before.vacuous, *after.vacuous}
        places = set(range(num_outputs)) - silent if unproved else ()
        shown = {output_name(self._current, place) for place in places}
        return Check(
            what,
            str(self.layouts[order]),
            order,
            len(after.digests),
            num_outputs,
            result,
            tuple(output_name(graph, place) for place in sorted(after.vacuous)),
            tuple(name for name in unproved if name in shown),
        )

    def _explain(
        self,
        graph: fx.Graph,
        what: str,
        order: str,
        differing: list[int],
        report: PassReport | None,
    ) -> str:
        def run(graph: fx.Graph, watch: StepWatcher) -> None:
            for _ in self.run(graph, order, watch):
                pass

        found = find_first_difference(self._current, graph, run)
        count = f"{len(differing)} of {len(output_values(graph))}"
        facts = [
            f"{self.layouts[order]}, reduction order {order}",
            *str(found or _EXCHANGED).splitlines(),
            f"{count} outputs differ: {name_outputs(graph, differing)}",
        ]
        lines = [
            f"compile(verify=True) on {self._name}: {what} changed what the step computes.",
            "",
            *(f"  {fact}" for fact in facts),
            "",
        ]
        if report is not None:
            lines.append(f"{report.name} {describe_claim(report)}.")
        return "\n".join([*lines, _ADVICE])


_EXCHANGED = "no node that is in both graphs differs: outputs were exchanged"


def _fits(graph: fx.Graph, layout: RankLayout) -> bool:
    """Whether a graph can run on these ranks.

    One that gathers has the shapes of as many ranks as it is made for.
    """
    known = {axis.label: axis.size for axis in layout.axes}
    fixed = [axis for axis in lay_out(graph).axes if axis.is_fixed]
    return all(known.get(axis.label, axis.size) == axis.size for axis in fixed)


def _differing_outputs(
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


# ----------------------------------------------------------------------------
# What is known about a program once it is built.


def certify(
    name: str,
    reports: Sequence[PassReport],
    verifier: Verifier | None,
    *,
    is_graph: bool,
    is_compiled: bool,
    is_pipelined: bool,
) -> Certificate:
    """Say what was checked about a program and what was not.

    Args:
        name: The step and the number of its program.
        reports: What the passes said.
        verifier: What compared graphs; None where none were compared.
        is_graph: Whether a graph is run, not a callable of the user's own.
        is_compiled: Whether Inductor compiles it.
        is_pipelined: Whether it leaves work for the next step.
    """
    left = ["the captured graph was not compared with the eager step"]
    if not is_graph:
        left.append(
            "the transformation returned a callable that is not a graph: what it computes "
            "cannot be checked"
        )
    if is_compiled:
        left.append("the code that Inductor made was not compared with its graph")
    if verifier is None:
        left.append("nothing was run on virtual ranks (verify=True)")
        return Certificate(name, tuple(reports), (), tuple(left))
    if verifier.refusal:
        left.insert(0, f"graphs were not compared: {verifier.refusal}")
    else:
        if is_pipelined:
            which = "no form" if is_compiled else "neither the last form nor the flush"
            left.append(
                f"{which} of an overlapped step was compared as it writes in place"
            )
        left += _not_shown(verifier)
    return Certificate(name, tuple(reports), tuple(verifier.checks), tuple(left))


def _not_shown(verifier: Verifier) -> Iterator[str]:
    if not verifier.layouts["rank"].groups:
        yield "the graph communicates nothing: it was run on one virtual rank"
        return
    yield (
        "every virtual rank ran the graph of this rank: constants that differ between "
        "ranks, such as where a shard begins, were this rank's"
    )
    for order, why in verifier.skipped.items():
        yield f"{order} order: {why}"
    run = {check.order for check in verifier.checks}
    small = {
        f"{order} order was run on {axis.size} ranks along {axis.label}, as many as the "
        "graph is made for: sums of so few terms do not show every order"
        for order, layout in verifier.layouts.items()
        for axis in layout.axes
        if axis.size < 4 and order in run
    }
    yield from sorted(small)
    yield "reduction orders of other backends: ring is the one of gloo"
