"""What a node takes: the same estimate on all ranks, from shapes or from measurements."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import fx
from torch.utils import flop_counter

from torchspmd import _torch
from torchspmd.comm import CommEvent
from torchspmd.errors import UsageError
from torchspmd.step.graph.metadata import describe_type, fake_value

_RATES = ("flops", "memory_bytes", "network_bytes")
_SHOWN = 6  # problems with operators in one message
_TIMES = ("launch_seconds", "latency_seconds")


class Link(NamedTuple):
    """A network between the ranks of a group.

    Attributes:
        network_bytes: Bytes a second that one rank sends.
        latency_seconds: What any collective takes at least.

    Example:
        >>> Link(network_bytes=1.25e8, latency_seconds=1e-4)  # 1 Gbit/s
        Link(network_bytes=125000000.0, latency_seconds=0.0001)
    """

    network_bytes: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """How fast one rank computes, moves memory and sends.

    Only the ratios matter for a schedule. Give every rank the same numbers: ranks that
    schedule by different ones would not run the same program, which is an error.

    Attributes:
        flops: Floating-point operations a second.
        memory_bytes: Bytes read and written a second by simple operators.
        network_bytes: Bytes a second that one rank sends.
        launch_seconds: What any operator takes at least.
        latency_seconds: What any collective takes at least.
        operators: Seconds of operators that were measured, by ``operator_key``; for these
            the rates do not count.
        axes: The networks of mesh axes, by name, where they differ from the one above:
            shards inside of a node and their replicas on several, for instance.

    Example:
        >>> ethernet = CostModel(flops=2e14, network_bytes=1.25e8)  # 1 Gbit/s
        >>> CostModel.for_device("cuda").network_bytes > ethernet.network_bytes
        True
        >>> in_a_node = Link(network_bytes=2e11, latency_seconds=1e-5)
        >>> cost = CostModel(network_bytes=2e10, axes={"shard": in_a_node})
    """

    flops: float = 1e14
    memory_bytes: float = 1e12
    network_bytes: float = 5e10
    launch_seconds: float = 5e-6
    latency_seconds: float = 2e-5
    operators: Mapping[str, float] = field(default_factory=dict, repr=False, hash=False)
    axes: Mapping[str, Link] = field(default_factory=dict, repr=False, hash=False)

    def __post_init__(self) -> None:
        rates = {name: getattr(self, name) for name in _RATES}
        times = {name: getattr(self, name) for name in _TIMES}
        problems = _wrong_axes(self.axes)
        for axis, link in self.axes.items() if not problems else ():
            rates[f"axes[{axis!r}].network_bytes"] = link.network_bytes
            times[f"axes[{axis!r}].latency_seconds"] = link.latency_seconds
        problems += [
            f"{name}={value!r}: give a finite number above 0"
            for name, value in rates.items()
            if not (_is_number(value) and value > 0)
        ]
        problems += [
            f"{name}={value!r}: give seconds, 0 or more and finite"
            for name, value in times.items()
            if not (_is_number(value) and value >= 0)
        ]
        problems += _wrong_operators(self.operators)
        if problems:
            raise UsageError("CostModel: " + "; ".join(problems) + ".")

    @classmethod
    def for_device(cls, device_type: str) -> "CostModel":
        """A coarse guess: a GPU with a fast link, or one CPU core on loopback."""
        if device_type == "cpu":
            return cls(5e10, 8e9, 5e8, launch_seconds=5e-6, latency_seconds=2e-4)
        return cls()

    def compute_seconds(self, node: fx.Node) -> float:
        """How long a node computes; nothing for views and for the graph's own marks."""
        if not computes(node):
            return 0.0
        if self.operators and (key := operator_key(node)) in self.operators:
            return self.operators[key]
        operator: Any = node.target
        values: Any = fx.node.map_arg((node.args, node.kwargs), fake_value)
        out = node.meta.get("val")
        counted = (
            _flops(operator, values[0], values[1], out) if _is_known(node) else 0.0
        )
        tensors = _torch.leaves_of(torch.Tensor, (values, out))
        moved = sum(each.nbytes for each in tensors)
        busy = max(counted / self.flops, moved / self.memory_bytes)
        return self.launch_seconds + busy

    def link_of(self, event: CommEvent) -> Link:
        """The network that a collective uses."""
        every = Link(self.network_bytes, self.latency_seconds)
        return self.axes.get(event.group.axis or "", every)

    def comm_seconds(self, event: CommEvent) -> float:
        """How long a collective is on the wire."""
        link = self.link_of(event)
        return link.latency_seconds + event.wire_bytes / link.network_bytes


def check_cost(cost: object, what: str, also: str = "None for a guess") -> None:
    """Refuse what is not a ``CostModel``; the one check for all that take a cost.

    Args:
        cost: What was given.
        what: What was called.
        also: What else it takes, for the message; None is refused where this is empty.

    Example:
        >>> check_cost(3, "fuse")
        Traceback (most recent call last):
            ...
        torchspmd.errors.UsageError: fuse(cost=3): give a CostModel, or None for a guess.
    """
    if isinstance(cost, CostModel) or (cost is None and also):
        return
    rest = f", or {also}" if also else ""
    raise UsageError(f"{what}(cost={cost!r}): give a CostModel{rest}.")


def _wrong_axes(axes: object) -> list[str]:
    if not isinstance(axes, Mapping):
        return [f"axes={axes!r}: give a mapping of names of mesh axes to a Link each"]
    return [
        f"axes[{axis!r}]={link!r}: give a Link(network_bytes, latency_seconds)"
        for axis, link in axes.items()
        if not isinstance(link, Link)
    ]


def _wrong_operators(operators: object) -> list[str]:
    if not isinstance(operators, Mapping):
        kind = type(operators).__name__
        return [f"operators={kind}: give a mapping of keys to seconds"]
    problems = [
        f"operators[{key!r}]: give keys as operator_key makes them, a str each"
        for key in operators
        if not isinstance(key, str)
    ]
    problems += [
        f"operators[{key!r}]={value!r}: give seconds, 0 or more and finite"
        for key, value in operators.items()
        if not (_is_number(value) and value >= 0)
    ]
    rest = len(problems) - _SHOWN
    return problems[:_SHOWN] + ([f"and {rest} more operators"] if rest > 0 else [])


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) <= sys.float_info.max


def computes(node: fx.Node) -> bool:
    """Whether a node is an operator that takes time to compute."""
    operator = node.target
    if node.op != "call_function" or not isinstance(operator, _torch.OpOverload):
        return False
    if operator is torch.ops.aten.sym_size.int:  # a look at a size
        return False
    return not operator.is_view and not _torch.packet_name(operator).startswith("_c10d")


def multiplies(node: fx.Node) -> bool:
    """Whether an operator is a product, a convolution or an attention."""
    operator: Any = node.target
    return operator.overloadpacket in flop_counter.flop_registry


def operator_key(node: fx.Node) -> str:
    """A key that nodes of the same work share: the operator and its arguments' shapes."""
    values = fx.node.map_arg((node.args, node.kwargs), fake_value)
    leaves, _ = _torch.flatten_tree(values)
    return " ".join([str(node.target), *map(_fact, leaves)])


def _fact(leaf: object) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return f"{describe_type(leaf)}{list(leaf.stride())}"


def device_of(graph: fx.Graph) -> str:
    """The type of device that a graph runs on: that of its first tensor."""
    for node in graph.find_nodes(op="placeholder"):
        device = getattr(node.meta.get("val"), "device", None)
        if device is not None:
            return str(device.type)
    return "cpu"


def _flops(operator: Any, args: Any, kwargs: Mapping[str, Any], out: Any) -> float:
    count = flop_counter.flop_registry.get(operator.overloadpacket)
    if count is None:
        return 0.0
    if "attention" in _torch.packet_name(operator):
        args = _with_own_keys(args)
    return float(count(*args, **kwargs, out_val=out))


def _with_own_keys(args: Sequence[Any]) -> list[Any]:
    """Keys and values for every head of the queries: torch 2.11 counts no shared ones."""
    heads = max(
        (x.shape[1] for x in args if isinstance(x, torch.Tensor) and x.dim() == 4),
        default=0,
    )
    return [
        torch.empty(x.shape[0], heads, *x.shape[2:], device="meta", dtype=x.dtype)
        if isinstance(x, torch.Tensor) and x.dim() == 4
        else x
        for x in args
    ]


def _is_known(node: fx.Node) -> bool:
    """Whether the shapes are there to count with: a pass may add nodes without them."""
    return all(fake_value(each) is not None for each in (node, *node.all_input_nodes))
