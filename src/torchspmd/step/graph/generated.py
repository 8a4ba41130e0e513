"""A graph as generated Python, which lets go of each value at its last use."""

import linecache
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, final

from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.metadata import output_node
from torchspmd.step.graph.pieces import Piece, Step

Boxed = Callable[[list[Any]], Sequence[Any]]  # takes its inputs out of the list


def write_python(
    graph: fx.GraphModule, steps: Sequence[Step], codes: Sequence[Boxed | None]
) -> Callable[..., Any]:
    """A function of the graph's inputs.

    Args:
        graph: The graph; its own code is not made.
        steps: What runs, in order.
        codes: What runs each piece; None for other steps.
    """
    nodes: dict[int, fx.Node] = {}  # by line: whose communication it is
    names = _Names({"module": graph, _torch.GENERATED_NODES: nodes})
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
        free = [f"{done}None"] if done else []
        if isinstance(step, Piece):
            # The list alone holds what is not needed any more: the code takes it out.
            lines.append(f"args = [{', '.join(map(names.text, step.inputs))}]")
            results = "".join(f"{node.name}, " for node in step.outputs)
            call = f"{names.add(code)}(args)"
            lines += [*free, f"{results}= {call}" if results else call]
        else:
            is_used = step in last_use
            call = _call(step, names)
            lines.append(f"{step.name} = {call}" if is_used else call)
            nodes[len(lines)] = step
            lines += free
    lines.append(f"return {names.text(output.args[0])}")
    text = "\n    ".join(lines) + "\n"
    file = f"{_torch.GENERATED_FILE} {id(graph):x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(True), file)
    exec(compile(text, file, "exec"), names.values)
    run: Callable[..., Any] = names.values["run"]
    weakref.finalize(run, linecache.cache.pop, file, None)
    return run


@final
@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class RunningGraph:
    """A graph that is called as generated Python, node by node.

    Attributes:
        module: The graph, with the tensors that it reads by name.
        run: A function of its inputs.
    """

    module: fx.GraphModule
    run: Callable[..., Any]

    @classmethod
    def of(cls, module: fx.GraphModule) -> Self:
        """Write a graph as Python."""
        skipped = ("placeholder", "get_attr", "output")
        steps = [node for node in module.graph.nodes if node.op not in skipped]
        return cls(module, write_python(module, steps, [None] * len(steps)))

    @property
    def graph(self) -> fx.Graph:
        """What is run."""
        return self.module.graph

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return self.run(*args)


def _call(node: fx.Node, names: "_Names") -> str:
    args = [names.text(each) for each in node.args]
    options = [f"{name}={names.text(each)}" for name, each in node.kwargs.items()]
    if node.op == "call_module":
        target = f"module.get_submodule({node.target!r})"
    elif node.op == "call_method":
        target, args = f"{args[0]}.{node.target}", args[1:]
    elif (binding := _binding_of(node)) is None:
        target = names.add(node.target)
    else:
        if binding.unpacks:
            sizes: Any = node.args[1]
            args = [args[0], *map(names.text, sizes)]
        if binding.is_method:
            target, args = f"{args[0]}.{binding.name}", args[1:]
        else:
            target = names.add(binding.function)
    return f"{target}({', '.join([*args, *options])})"


def _binding_of(node: fx.Node) -> _torch.Binding | None:
    args, options = fx.node.map_arg(
        (node.args, node.kwargs), lambda source: source.meta.get("val")
    )
    return _torch.binding_of(node.target, args, options)


class _Names:
    """The names of objects in generated code.

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
