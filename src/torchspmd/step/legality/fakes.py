"""What the nodes of an edited graph give, told without values.

A pass may change a call and leave its ``meta["val"]`` as it was. A check that believes it
takes one dtype for another. So what capture wrote down is believed for calls that take
what they took before, and computed again for all others.
"""

import logging
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import find_operator
from torchspmd.step.graph.aliases import operator_of
from torchspmd.step.graph.metadata import readable_name
from torchspmd.step.legality.edit import Edit, Problem, is_equal

_SHOWN = 3  # operands in one line
_RUNS = "Cast or reshape in front of a call whose operands get another dtype or shape."
_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError)
# Collectives are not called, which would count them: these give what others give.
_COLLECTIVES = {
    "all_gather_into_tensor": _torch.ALL_GATHER,
    "all_reduce": _torch.ALL_REDUCE,
    "broadcast": _torch.ALL_REDUCE,
    "reduce_scatter_tensor": _torch.REDUCE_SCATTER,
}
_IN_PLACE = ("all_reduce_", "all_reduce_coalesced_", "broadcast_", "wait_tensor")
# Other functions of Python may do anything, and are not called to see what they give.
_FUNCTIONS = frozenset(
    {
        operator.add,
        operator.floordiv,
        operator.getitem,
        operator.mod,
        operator.mul,
        operator.neg,
        operator.sub,
        operator.truediv,
    }
)


@dataclass(frozen=True, slots=True)
class FakeResults:
    """What each node of an edited graph gives.

    Attributes:
        values: A fake value for each node; None where it is not known.
        problems: Calls that could run before, and cannot on what they are given now.
        is_plain: Whether the tensors of the graph belong to no fake mode.
    """

    values: Mapping[fx.Node, Any]
    problems: tuple[Problem, ...]
    is_plain: bool

    def write_down(self) -> None:
        """Mend what the graph says of its nodes, for whoever reads it next."""
        for node, value in self.values.items():
            written = node.meta.get("val")
            if value is None or value is written or _told(value) == _told(written):
                continue
            node.meta["val"] = _as_plain(value) if self.is_plain else value


def find_fakes(edit: Edit) -> FakeResults:
    """Compute again what changed calls give, and all calls behind that give another.

    >>> from torchspmd.step.graph.snapshot import copy_graph
    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["val"] = torch.empty(3, device="meta")
    >>> made = graph.call_function(torch.ops.aten.ones_like.default, (x,))
    >>> made.meta["val"] = torch.empty(3, device="meta")
    >>> _ = graph.output([made])
    >>> before, twins = copy_graph(graph)
    >>> made.kwargs = {"dtype": torch.bfloat16}
    >>> find_fakes(Edit.of(before, graph, twins)).values[made].dtype
    torch.bfloat16
    """
    return _Finder(edit).find()


class _Finder:
    """Goes through an edited graph once."""

    def __init__(self, edit: Edit) -> None:
        self._edit = edit
        self._values: dict[fx.Node, Any] = {}
        self._kept: set[fx.Node] = set()  # give what their twins gave
        self._told: dict[fx.Node, str] = {}
        self._maker = _Maker(edit.after)

    def find(self) -> FakeResults:
        problems: list[Problem] = []
        for node in self._edit.after.nodes:
            if node.op == "output":
                continue
            twin = self._edit.old.get(node)
            if twin is not None and self._takes_the_same(node, twin):
                self._kept.add(node)
                value = twin.meta.get("val")
            else:
                value = self._compute(node, twin, problems)
            if node.op == "placeholder" and value is None:
                value = node.meta.get("val")  # nothing else says what it is
            self._values[node] = value
        return FakeResults(self._values, tuple(problems), self._maker.makes_others)

    def _takes_the_same(self, node: fx.Node, twin: fx.Node) -> bool:
        if self._kept.issuperset(node.all_input_nodes) and self._edit.is_same(
            node, twin
        ):
            return True
        if node.op != twin.op or node.target != twin.target:
            return False
        now: Any = fx.node.map_arg((node.args, node.kwargs), self._tell)
        was: Any = fx.node.map_arg((twin.args, twin.kwargs), self._tell_before)
        return is_equal(now, was)

    def _tell(self, node: fx.Node) -> str:
        """What is known of a node, as text; what is not known is like nothing else."""
        if node in self._kept:
            return self._tell_before(self._edit.old[node])
        if node not in self._told:
            value = self._values[node]
            self._told[node] = f"new {node.name}" if value is None else _told(value)
        return self._told[node]

    def _tell_before(self, node: fx.Node) -> str:
        if node not in self._told:
            value = node.meta.get("val")
            self._told[node] = f"old {node.name}" if value is None else _told(value)
        return self._told[node]

    def _compute(
        self, node: fx.Node, twin: fx.Node | None, problems: list[Problem]
    ) -> Any:
        try:
            return self._maker.result(node, self._values)
        except _REFUSALS as error:
            # Operators that do not work on fake tensors raise subclasses.
            if twin is None or type(error) not in _REFUSALS:
                return None
            if node.target == twin.target and self._could_run(twin):
                problems.append(self._problem(node, twin))
        except Exception:  # of no common class in torch; then nothing is known
            pass
        return None

    def _could_run(self, twin: fx.Node) -> bool:
        values = {each: each.meta.get("val") for each in twin.all_input_nodes}
        try:
            return self._maker.result(twin, values) is not None
        except Exception:  # then that it fails now says nothing
            return False

    def _problem(self, node: fx.Node, twin: fx.Node) -> Problem:
        pairs = zip(node.all_input_nodes, twin.all_input_nodes, strict=False)
        shown = [
            f"{readable_name(now)} as {_show(self._values[now])}, before "
            f"{_show(was.meta.get('val'))}"
            for now, was in pairs
            if _show(self._values[now]) != _show(was.meta.get("val"))
        ]
        more = f", and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
        what = f"it takes {'; '.join(shown[:_SHOWN])}{more}"
        if not shown:
            what = "it takes other arguments than before"
        return Problem("call", f"{readable_name(node)} cannot run: {what}", _RUNS)


class _Maker:
    """Runs calls on fake tensors, in the mode of those that a graph has."""

    def __init__(self, graph: fx.Graph) -> None:
        values = (node.meta.get("val") for node in graph.nodes)
        self._one = next(filter(_is_fake, values), None)
        self._world: _torch.FakeWorld | None = None

    @property
    def makes_others(self) -> bool:
        """Whether results are of another sort than what the graph has."""
        return self._world is not None

    def result(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """What a call gives for fake operands; None where that is not known."""
        target = operator_of(node)
        if target is None and node.target not in _FUNCTIONS:
            return None
        if any(values.get(each) is None for each in node.all_input_nodes):
            return None
        operands: Any = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if target is not None and _is_collective(target):
            return _of_collective(_torch.packet_name(target), operands[0])
        leaves, structure = _torch.flatten_tree(operands)
        # An operator that works in place may change the strides of its operand.
        is_writing = target is not None and _torch.signature_of(target).written
        leaves = [self._operand(leaf, bool(is_writing)) for leaf in leaves]
        args, options = _torch.unflatten_tree(leaves, structure)
        one = self._any()
        with _silent(type(one).__module__):
            return _torch.fake_result(_call, (one, node.target, args, options))

    def _operand(self, leaf: Any, is_written: bool) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if self._one is None or (self._world and not _is_fake(leaf)):
            self._any()
            assert self._world is not None
            return self._world.fake(leaf)
        return leaf.detach() if is_written else leaf

    def _any(self) -> torch.Tensor:
        """A tensor of the mode: operators that only make tensors have none."""
        if self._one is None:
            self._world = _torch.FakeWorld()
            self._one = self._world.fake(torch.empty(0))
        return self._one


@contextmanager
def _silent(module: str) -> Iterator[None]:
    """Without the log of torch's module: that a call fails is told by the check."""
    log = logging.getLogger(module)
    was_disabled, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was_disabled


def _is_collective(target: _torch.OpOverload) -> bool:
    return target is _torch.WAIT or bool(find_operator(_torch.packet_name(target)))


def _of_collective(name: str, args: Any) -> Any:
    namespace, _, kind = name.partition("::")
    if namespace != "_c10d_functional":
        return None
    if kind in _IN_PLACE:
        return args[0]
    single = _COLLECTIVES.get(kind.removesuffix("_coalesced"))
    if single is None:
        return None
    if not kind.endswith("_coalesced"):
        return _torch.fake_result(single, args)
    return [_torch.fake_result(single, (each, *args[1:])) for each in args[0]]


def _call(_: torch.Tensor, target: Any, args: Any, options: Any) -> Any:
    return target(*args, **options)


def _is_fake(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a tensor belongs to a mode; those on the meta device do not."""
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter)
    return isinstance(value, torch.Tensor) and not is_plain and _torch.is_fake(value)


def _as_plain(value: Any) -> Any:
    """Without a mode, as in graphs whose tensors have none."""
    leaves, structure = _torch.flatten_tree(value)
    plain = [
        torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
        )
        if _is_fake(leaf)
        else leaf
        for leaf in leaves
    ]
    return _torch.unflatten_tree(plain, structure)


def _told(value: Any) -> str:
    """All that must be the same for two fake values to be.

    >>> _told([torch.empty(3, 1, device="meta"), 2])
    '[float32 meta strided (3, 1) (1, 1), int 2]'
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_told, value))}]"
    if not isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {value!r}"
    kind = f"{_short(value.dtype)} {value.device} {_short(value.layout)}"
    if value.layout is not torch.strided:
        return f"{kind} {tuple(value.shape)}"
    return f"{kind} {tuple(value.shape)} {value.stride()}"


def _show(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{_short(value.dtype)}{list(value.shape)}"


def _short(name: object) -> str:
    return str(name).removeprefix("torch.")
