"""One call in a graph, its arguments by name, and what rules need to read it."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import operator_of
from torchspmd.step.legality.symbolic.segments import Shape
from torchspmd.step.legality.symbolic.table import Flat, ValueTable

# What a node gives, without values; None where that is not known.
Fakes: TypeAlias = Mapping[fx.Node, Any]
# How what a node gives lies in memory.
Layouts: TypeAlias = Mapping[fx.Node, Hashable]


@dataclass(frozen=True, slots=True)
class Call:
    """A call of an operator or a function.

    Attributes:
        node: The node that calls.
        name: ``namespace::name`` of the functional form; of a function, its own name.
        head: The name with the overload, by which calls are told apart; of a function,
            with its identity: two functions may have one name.
        arguments: All arguments by name, defaults filled in, as they stand in the graph.
        signature: What the operator's schema says; None for a function.
    """

    node: fx.Node
    name: str
    head: str
    arguments: dict[str, Any]
    signature: _torch.Signature | None

    @property
    def first(self) -> Any:
        """The first argument."""
        return next(iter(self.arguments.values()), None)


class Reader(Protocol):
    """Who knows the values of a graph's nodes."""

    table: ValueTable
    fakes: Fakes
    layouts: Layouts

    def value(self, node: fx.Node) -> int:
        """The value of a node at this point of the graph."""


class Impossible(Exception):  # noqa: N818 - it is no error of ours: it says that a call is
    """A call that cannot run on what it is given; the text says why."""


# Gives the value of a call; None for a call that it does not understand.
Rule: TypeAlias = Callable[[Reader, Call], int | None]


def read_call(node: fx.Node) -> Call:
    """A node's call with its arguments by name.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> call = read_call(graph.call_function(torch.ops.aten.add_.Tensor, (x, x)))
    >>> call.head, call.arguments["alpha"]
    ('aten::add.Tensor', 1)
    """
    operator = operator_of(node)
    if operator is None:
        named = {str(place): each for place, each in enumerate(node.args)}
        name = f"{node.op} {_name_of(node.target)}"
        head = name if isinstance(node.target, str) else f"{name} {id(node.target):#x}"
        return Call(node, name, head, {**named, **node.kwargs}, None)
    signature = _torch.signature_of(operator)
    given = dict(zip(_torch.argument_names(operator), node.args, strict=False))
    arguments = {
        name: given.get(name, node.kwargs.get(name, signature.defaults.get(name)))
        for name in signature.arguments
    }
    head = f"{signature.name}.{signature.overload}"
    return Call(node, signature.name, head, arguments, signature)


def _name_of(target: Any) -> str:
    if isinstance(target, str):
        return target
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def split_arguments(reader: Reader, arguments: Any) -> tuple[Hashable, list[int]]:
    """What stands in arguments besides values, and the values in order."""
    children: list[int] = []

    def strip(each: Any) -> Hashable:
        if isinstance(each, fx.Node):
            children.append(reader.value(each))
            return "*"
        if isinstance(each, (list, tuple)):
            return tuple([strip(item) for item in each])
        if isinstance(each, dict):
            return tuple([(name, strip(item)) for name, item in each.items()])
        if isinstance(each, slice):
            return "slice", strip((each.start, each.stop, each.step))
        if isinstance(each, (str, torch.dtype, torch.device)) or each is None:
            return each
        return type(each).__name__, repr(each)  # 1, 1.0 and True are not the same

    return strip(arguments), children


def tensor_of(reader: Reader, argument: Any) -> tuple[int, Flat] | None:
    """The value of an argument that is a tensor of known shape."""
    if not isinstance(argument, fx.Node):
        return None
    value = reader.value(argument)
    flat = reader.table[value]
    return (value, flat) if isinstance(flat, Flat) else None


def kind_of(reader: Reader, argument: Any) -> tuple[torch.dtype, torch.device] | None:
    """Dtype and device of an argument, where they are known."""
    value = reader.fakes.get(argument) if isinstance(argument, fx.Node) else None
    return (value.dtype, value.device) if isinstance(value, torch.Tensor) else None


def shape_of(value: object) -> Shape | None:
    """The shape of a fake tensor; None where it is not known, or no tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    shape = tuple(value.shape)
    return shape if all(type(size) is int for size in shape) else None


def integers(argument: Any) -> tuple[int, ...] | None:
    """A list of known integers."""
    items = argument if isinstance(argument, (list, tuple)) else [argument]
    return tuple(items) if all(type(item) is int for item in items) else None
