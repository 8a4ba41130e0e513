"""A graph as Python that calls code of Inductor, piece by piece.

Communication is not part of a piece, so the order of a schedule is kept.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.graph.generated import Boxed, write_python
from torchspmd.step.graph.pieces import Piece, find_steps
from torchspmd.step.progress import phase

_ADD, _MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor

_SYMBOLS = (torch.SymFloat, torch.SymInt, torch.SymBool)


def check_compilable(graph: fx.GraphModule) -> None:
    """Refuse a graph that Inductor cannot compile.

    Inputs that are numbers do not matter: operators on numbers run as they are.
    """
    if any(_reads_number(node) for node in graph.graph.nodes):
        raise CaptureError(
            "the Inductor backend cannot compile a graph that reads numbers from tensors: "
            "the optimizer reads its step counter on the host. Use an optimizer with "
            "fused=True or capturable=True, or backend='graph'."
        )


def _reads_number(node: fx.Node) -> bool:
    """Whether a node makes a number of a tensor."""
    if not isinstance(node.meta.get("val"), _SYMBOLS):
        return False
    values = (source.meta.get("val") for source in node.all_input_nodes)
    return any(isinstance(value, torch.Tensor) for value in values)


@final
@dataclass(slots=True)
class CompiledPieces:
    """What Inductor made of the pieces of graphs that belong together.

    Attributes:
        by_form: The compiled code of each form.
        origins: Where each of them came from.
    """

    by_form: dict[str, Boxed] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def code_for(self, piece: Piece) -> Boxed:
        """The compiled code of a piece: made once for all equal ones."""
        form = piece.form()
        if form not in self.by_form:
            graph = piece.as_graph()
            _multiply_before_adding(graph.graph)
            inputs = [node.meta["val"] for node in piece.inputs]
            made, origin = _torch.compile_with_inductor(graph, inputs)
            self.by_form[form], self.origins[form] = made, origin
        return self.by_form[form]


def lower(
    graph: fx.GraphModule, compiled: CompiledPieces | None = None
) -> tuple[Callable[..., Any], str]:
    """A graph whose pieces are compiled by Inductor, and a line about them.

    Args:
        graph: The graph; it is not changed.
        compiled: What was compiled for other graphs of the same step; used and added to.
    """
    check_compilable(graph)
    compiled = compiled or CompiledPieces()
    known = len(compiled.origins)
    steps = find_steps(graph)
    with phase("compiling"):
        codes = [compiled.code_for(s) if isinstance(s, Piece) else None for s in steps]
    run = write_python(graph, steps, codes)
    pieces = [each for each in codes if each is not None]
    new = Counter(list(compiled.origins.values())[known:])
    return run, (
        f"Inductor: {', '.join(new) or 'nothing to compile'}; {len(pieces)} pieces, "
        f"{len(set(map(id, pieces)))} of them different, {new.total()} of them new, and "
        f"{len(steps) - len(pieces)} operators and views as they are"
    )


def _multiply_before_adding(graph: fx.Graph) -> None:
    """Write ``add(x, y, alpha=a)`` as ``add(x, a * y)``.

    Inductor makes one ``addmm`` of an ``add`` and a matrix product, and drops ``alpha``:
    an update ``p.add_(grad, alpha=-lr)`` would add the gradient itself.
    """
    for node in graph.find_nodes(op="call_function", target=_ADD):
        alpha = node.kwargs.get("alpha", 1)
        if isinstance(alpha, (int, float)) and alpha == 1:
            continue
        with graph.inserting_before(node):
            product = graph.call_function(_MUL, (node.args[1], alpha))
        if isinstance(node.args[1], fx.Node):
            product.meta = dict(node.args[1].meta)
        node.args = (node.args[0], product)
        node.kwargs = {}
