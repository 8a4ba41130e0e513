"""A graph as Python that calls code of Inductor, piece by piece.

Communication is no part of a piece, so what a schedule put in order stays so.
"""

import linecache
import math
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.graph.aliases import (
    is_wait,
    memory_sources,
    operator_of,
    written_nodes,
)
from torchspmd.step.graph.collectives import is_communication
from torchspmd.step.graph.metadata import output_node
from torchspmd.step.graph.pieces import Piece, Step, find_steps
from torchspmd.step.progress import phase

_ADD, _MUL = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default

Boxed = Callable[[list[Any]], Sequence[Any]]  # takes its inputs out of the list


def check_compilable(graph: fx.GraphModule) -> None:
    """Refuse a graph that Inductor cannot compile."""
    if _torch.has_symbols(graph):
        raise CaptureError(
            "the Inductor backend cannot compile a graph that reads numbers from tensors: "
            "the optimizer reads its step counter on the host. Use an optimizer with "
            "fused=True or capturable=True, or backend='graph'."
        )


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
    overwriting = _find_overwriting(graph.graph, steps)
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
            call = _call(step, names, overwriting.get(step))
            lines += [f"{step.name} = {call}" if is_used else call, free]
    lines.append(f"return {names.text(output.args[0])}")
    text = "\n    ".join(filter(None, lines)) + "\n"
    file = f"<torchspmd pieces {id(graph):x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), names.values)
    run: Callable[..., Any] = names.values["run"]
    weakref.finalize(run, linecache.cache.pop, file, None)
    return run


def _find_overwriting(graph: fx.Graph, steps: Sequence[Step]) -> dict[fx.Node, Any]:
    """Operators that run as they are, and write into their input: nothing needs it later.

    A compiler does so within a piece. Memory that communication may still read, or that
    comes from outside, is left alone.
    """
    outside = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    root = {node: node for node in outside}
    kept, last = set(outside), dict[fx.Node, int]()
    for index, step in enumerate(steps):
        if isinstance(step, Piece):
            root |= {node: node for node in step.outputs}
            last |= {root[source]: index for source in step.inputs}
            continue
        sources = {root[source] for source in step.all_input_nodes}
        last |= dict.fromkeys(sources, index)
        is_shared = bool(memory_sources(step)) or step.target is _UNSAFE_VIEW
        root[step] = next(iter(sources)) if is_shared and sources else step
        is_plain = operator_of(step) is not None or step.target is operator.getitem
        is_async = is_communication(step) or is_wait(step)
        if (
            not is_plain
            or is_async
            or written_nodes(step)
            or len(sources) * is_shared > 1
        ):
            kept |= {*sources, root[step]}
    kept |= {root[source] for source in output_node(graph).all_input_nodes}
    found: dict[fx.Node, Any] = {}
    for index, step in enumerate(steps):
        form = None if isinstance(step, Piece) else _pointwise_in_place(step)
        if form is None or isinstance(step, Piece):
            continue
        target, *others = step.all_input_nodes
        memory = root[target]
        is_free = memory not in kept and last[memory] == index
        if not is_free or any(root[other] is memory for other in others):
            continue
        if _is_alike(step, target) and _is_alike(step, memory, in_size_only=True):
            found[step] = form
    return found


def _pointwise_in_place(node: fx.Node) -> Any:
    """The in-place form of an operator that computes element by element, if it has one."""
    target = operator_of(node)
    if target is None or torch.Tag.pointwise not in target.tags or memory_sources(node):
        return None
    is_first = bool(node.args) and isinstance(node.args[0], fx.Node)
    return _torch.in_place_form(target) if is_first else None


def _is_alike(node: fx.Node, other: fx.Node, *, in_size_only: bool = False) -> bool:
    left, right = node.meta.get("val"), other.meta.get("val")
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return False
    if in_size_only:
        return left.numel() == right.numel()
    same = left.shape == right.shape and left.stride() == right.stride()
    return same and left.dtype == right.dtype and left.device == right.device


def _call(node: fx.Node, names: "_Names", form: Any = None) -> str:
    args = [names.text(each) for each in node.args]
    args += [f"{name}={names.text(each)}" for name, each in node.kwargs.items()]
    match node.op:
        case "call_method":
            return f"{args[0]}.{node.target}({', '.join(args[1:])})"
        case "call_module":
            target = f"module.get_submodule({node.target!r})"
        case _:
            target = names.add(form or node.target)
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
