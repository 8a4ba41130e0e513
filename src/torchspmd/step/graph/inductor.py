"""A graph as Python that calls code of Inductor, piece by piece.

Communication is no part of a piece, so what a schedule put in order stays so.
"""

import linecache
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.graph.metadata import output_node
from torchspmd.step.graph.pieces import Piece, Step, find_steps
from torchspmd.step.progress import phase

_ADD, _MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor

_SYMBOLS = (torch.SymFloat, torch.SymInt, torch.SymBool)

Boxed = Callable[[list[Any]], Sequence[Any]]  # takes its inputs out of the list


def check_compilable(graph: fx.GraphModule) -> None:
    """Refuse a graph that Inductor cannot compile.

    Numbers that go into the graph are none of its business: what computes with them runs
    as it is.
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
    run = _write_run(graph, steps, codes)
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


# ----------------------------------------------------------------------------
# The steps as Python that lets go of each value at its last use.


def _write_run(
    graph: fx.GraphModule, steps: Sequence[Step], codes: Sequence[Boxed | None]
) -> Callable[..., Any]:
    names = _Names({"module": graph})
    inputs = "".join(f"{n.name}, " for n in graph.graph.find_nodes(op="placeholder"))
    lines = [f"def run({inputs.rstrip(', ')}):"]
    output = output_node(graph.graph)
    last_use: dict[fx.Node, Step] = {}
    for step in (*steps, output):
        for source in step.inputs if isinstance(step, Piece) else step.all_input_nodes:
            last_use[source] = step
    over: dict[int, list[str]] = {}
    for source, step in last_use.items():
        if source.op != "get_attr" and step is not output:
            over.setdefault(id(step), []).append(source.name)
    for step, code in zip(steps, codes, strict=True):
        done = "".join(f"{name} = " for name in over.get(id(step), ()))
        free = f"{done}None" if done else ""
        if isinstance(step, Piece):
            # The list alone holds what is not needed any more: the code takes it out.
            lines.append(f"args = [{', '.join(map(names.text, step.inputs))}]")
            results = "".join(f"{node.name}, " for node in step.outputs)
            call = f"{names.add(code)}(args)"
            lines += [free, f"{results}= {call}" if results else call]
        else:
            is_used = step in last_use
            call = _call(step, names)
            lines += [f"{step.name} = {call}" if is_used else call, free]
    lines.append(f"return {names.text(output.args[0])}")
    text = "\n    ".join(filter(None, lines)) + "\n"
    file = f"<torchspmd pieces {id(graph):x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), names.values)
    run: Callable[..., Any] = names.values["run"]
    weakref.finalize(run, linecache.cache.pop, file, None)
    return run


def _call(node: fx.Node, names: "_Names") -> str:
    args = [names.text(each) for each in node.args]
    args += [f"{name}={names.text(each)}" for name, each in node.kwargs.items()]
    match node.op:
        case "call_method":
            return f"{args[0]}.{node.target}({', '.join(args[1:])})"
        case "call_module":
            target = f"module.get_submodule({node.target!r})"
        case _:
            target = names.add(node.target)
    return f"{target}({', '.join(args)})"


class _Names:
    """What generated code calls things.

    Attributes:
        values: The globals of the code.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self._by_id: dict[int, str] = {}

    def add(self, value: object) -> str:
        """The name of an object, which is held from now on."""
        if id(value) not in self._by_id:
            name = self._by_id[id(value)] = f"_{len(self.values)}"
            self.values[name] = value
        return self._by_id[id(value)]

    def text(self, value: Any) -> str:
        """An argument as Python."""
        match value:
            case fx.Node():
                return (
                    f"module.{value.target}" if value.op == "get_attr" else value.name
                )
            case list() | tuple():
                inside = "".join(f"{self.text(each)}, " for each in value)
                return f"[{inside}]" if isinstance(value, list) else f"({inside})"
            case dict():
                pairs = (f"{key!r}: {self.text(each)}" for key, each in value.items())
                return f"{{{', '.join(pairs)}}}"
            case None | bool() | int() | str():
                return repr(value)
            case float() if math.isfinite(value):
                return repr(value)
            case _:
                return self.add(value)
