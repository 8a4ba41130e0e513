"""Makes the certificate of a program while its graph is transformed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from torchspmd.step.capture.inventory import Inventory
from torchspmd.step.deferral.module import IterGraphModule
from torchspmd.step.graph.reports import PassReport
from torchspmd.step.lower.backends import Prepared
from torchspmd.step.passes.runner import observing_passes, pass_reports
from torchspmd.step.virtual.certificate import Certificate
from torchspmd.step.virtual.verify import (
    Verification,
    Verifier,
    is_pipelined,
    without_marks,
)


def prepare_certified(
    name: str,
    captured: fx.GraphModule,
    inventory: Inventory,
    prepare: Callable[[], Prepared],
    options: Verification | None,
    *,
    is_compiled: bool,
) -> tuple[Prepared, Certificate]:
    """Prepare a captured graph, compare graphs where asked for, and say what is known.

    Args:
        name: The step and the number of its program.
        captured: The graph, before anything is done to it.
        inventory: What the step is called with.
        prepare: Transforms the graph and makes it ready to run.
        options: How to compare; None to compare nothing.
        is_compiled: Inductor makes what is run.
    """
    if options is None:
        prepared = prepare()
        reports = _reports(captured, prepared)
        left = [
            *_not_seen(prepared, is_compiled),
            "nothing was run on virtual ranks (verify=True)",
        ]
        return prepared, Certificate(name, reports, (), tuple(left))
    verifier = Verifier(name, captured, inventory.flat_inputs(), options)
    undone: list[PassReport] = []
    with verifier.observing(), observing_passes(_look_away, _adding(undone)):
        prepared = prepare()
    if prepared.running is not None:
        verifier.compare(prepared.graph.graph, "an edit outside of the passes")
        verifier.compare(prepared.running.graph, "the form that writes in place")
        verifier.compare_pipelined(prepared.graph.graph, _overlapped(prepared))
    left = list(_not_seen(prepared, is_compiled))
    if verifier.refusal:
        left.insert(0, f"graphs were not compared: {verifier.refusal}")
    else:
        left += [*_not_run(prepared, is_compiled), *_not_shown(verifier)]
    gone = set(map(id, undone))
    reports = tuple(each for each in verifier.reports if id(each) not in gone)
    return prepared, Certificate(name, reports, tuple(verifier.checks), tuple(left))


def _look_away(*_: object) -> None:
    """What passes do is the verifier's."""


def _adding(undone: list[PassReport]) -> Callable[[Sequence[PassReport], Any], None]:
    """Collects what a failure around passes undid."""
    return lambda reports, _: undone.extend(reports)


def _overlapped(prepared: Prepared) -> dict[str, fx.Graph]:
    """The graphs that steps run which leave work, as virtual ranks can run them."""
    run = prepared.run
    if not isinstance(run, IterGraphModule):
        return {}
    graphs = prepared.overlapped.items()
    return {name: without_marks(graph, run.marks) for name, graph in graphs}


def _reports(captured: fx.GraphModule, prepared: Prepared) -> tuple[PassReport, ...]:
    """What the passes said, whatever module they ran on."""
    modules: dict[int, object] = {id(each): each for each in (captured, prepared.graph)}
    if isinstance(prepared.run, (fx.GraphModule, IterGraphModule)):
        modules[id(prepared.run)] = prepared.run
    return tuple(report for each in modules.values() for report in pass_reports(each))


def _not_seen(prepared: Prepared, is_compiled: bool) -> Iterator[str]:
    yield "the captured graph was not compared with the eager step"
    if prepared.running is None:
        yield (
            "the transformation returned a callable that is not a graph: what it computes "
            "cannot be checked"
        )
    if is_compiled:
        yield "the code that Inductor made was not compared with its graph"


def _not_run(prepared: Prepared, is_compiled: bool) -> Iterator[str]:
    if is_pipelined(prepared.graph.graph):
        which = "no form" if is_compiled else "neither the last form nor the flush"
        yield f"{which} of an overlapped step was compared as it writes in place"


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
