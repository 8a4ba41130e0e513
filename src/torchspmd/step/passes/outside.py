"""What happens around passes: edits between them, and modules that cannot be judged."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from torchspmd.errors import LegalityError, PassWarning
from torchspmd.step.graph.reports import PassReport
from torchspmd.step.graph.snapshot import copy_graph, num_changes
from torchspmd.step.iterate.iter_graph import IterGraph
from torchspmd.step.iterate.iteration import IterGraphModule

_GRAPH = (
    "graph: main_gm is no longer a graph module with marks on what is moved. A pass edits "
    "the graph that it finds, or sets gm.graph; it sets neither main_gm nor main_gm.graph"
)
_OUTPUT = (
    "output: the graph does not end with an output node. A pass keeps the outputs, all and "
    "in their order: the caller takes them apart"
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
