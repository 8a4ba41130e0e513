"""What is known about a program once it is built: its certificate."""

from collections.abc import Iterator, Sequence

from torchspmd.step.graph.reports import PassReport
from torchspmd.step.virtual.certificate import Certificate
from torchspmd.step.virtual.verify import Verifier


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
