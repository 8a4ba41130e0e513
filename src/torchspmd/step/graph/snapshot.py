"""A graph as it was, to compare with and to go back to."""

import operator
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import fx, nn

from torchspmd import _torch
from torchspmd.step.graph.metadata import OutputKind, readable_name, roles_of, set_roles
from torchspmd.step.graph.nodes import copy_nodes

# ----------------------------------------------------------------------------
# Everything that a module and its submodules hold by name, to put back after a failure.

_CONTAINERS = (dict, OrderedDict, set, list)


@dataclass(frozen=True, slots=True)
class Attributes:
    """What a module and its submodules hold: objects, not what is in their tensors.

    >>> module = nn.Linear(2, 2)
    >>> held = Attributes.of(module)
    >>> module.extra, module.bias = nn.ReLU(), None
    >>> held.put_back()
    >>> hasattr(module, "extra"), module.bias is None
    (False, False)
    """

    held: tuple[tuple[nn.Module, dict[str, Any]], ...]
    contents: tuple[tuple[Any, Any], ...]  # of containers, such as that of parameters

    @classmethod
    def of(cls, root: nn.Module) -> Self:
        """Note what there is."""
        held = tuple((module, dict(vars(module))) for module in root.modules())
        containers = [
            value
            for _, values in held
            for value in values.values()
            if type(value) in _CONTAINERS
        ]
        return cls(held, tuple((each, each.copy()) for each in containers))

    def put_back(self) -> None:
        """Remove what was added since, and give back what was replaced or removed."""
        for module, values in self.held:
            vars(module).clear()
            vars(module).update(values)
        for container, content in self.contents:
            container.clear()
            add = container.extend if isinstance(container, list) else container.update
            add(content)


# ----------------------------------------------------------------------------
# The tensors and modules that a graph reads by name, as they were.
#
# What is not seen: writes into a tensor larger than ``_MOST_KEPT`` that torch does not
# count (through ``.data``, NumPy or a kernel of another library), and changes inside of a
# module that a graph calls.

_MOST_KEPT = 1 << 20  # bytes of a tensor of which a copy is kept
_GONE = object()


@dataclass(frozen=True, slots=True)
class _Constant:
    """One attribute as it was, and how to tell whether it is the same."""

    value: object
    mark: object  # of a tensor: what changes when it is written
    copy: torch.Tensor | None

    @classmethod
    def of(cls, value: object) -> Self:
        copy = _copy(value) if isinstance(value, torch.Tensor) else None
        return cls(value, _mark(value), copy)

    def change(self, now: object) -> str:
        """What became of it, in a few words; empty where it is as it was."""
        if self.copy is not None and isinstance(now, torch.Tensor):
            if _has_same_bits(self.copy, now):
                return ""
        elif now is self.value and self.mark == _mark(now):
            return ""
        if now is _GONE:
            return "is gone"
        return "was written into" if now is self.value else "was replaced"


@dataclass(frozen=True, slots=True)
class Constants:
    """What the ``get_attr`` and ``call_module`` nodes of a graph read."""

    kept: Mapping[str, _Constant]

    @classmethod
    def of(cls, gm: Any) -> Self:
        """Note what the graph of a module, or of an ``IterGraphModule``, reads."""
        names = {str(node.target) for node in _readers(gm.graph)}
        return cls({name: _Constant.of(_find(_owner(gm), name)) for name in names})

    def changes(self, gm: Any) -> list[str]:
        """What the module's graph still reads and is not what it was, a text each.

        >>> graph = fx.Graph()
        >>> made = graph.output(graph.get_attr("kept"))
        >>> gm = fx.GraphModule({"kept": torch.ones(2)}, graph)
        >>> constants = Constants.of(gm)
        >>> found = gm.kept.zero_()
        >>> constants.changes(gm)
        ["the tensor 'kept', which kept reads, was written into"]
        >>> constants.put_back()
        >>> gm.kept.tolist()
        [1.0, 1.0]
        """
        found: dict[str, str] = {}
        for node in _readers(gm.graph):
            name = str(node.target)
            kept = self.kept.get(name)
            change = "" if kept is None else kept.change(_find(_owner(gm), name))
            if kept is not None and change:
                what = "tensor" if isinstance(kept.value, torch.Tensor) else "attribute"
                text = (
                    f"the {what} {name!r}, which {readable_name(node)} reads, {change}"
                )
                if change == "was written into" and kept.copy is None:
                    text += " (it is too large to be put back)"
                found.setdefault(name, text)
        return list(found.values())

    def put_back(self) -> None:
        """Write back what small tensors held."""
        for each in self.kept.values():
            value, copy = each.value, each.copy
            if copy is None or not isinstance(value, torch.Tensor):
                continue
            if _has_same_bits(copy, value):
                continue
            if (value.shape, value.stride()) == (copy.shape, copy.stride()):
                value.detach().copy_(copy)  # where others may share the memory
            else:
                value.data = copy.clone()


def _readers(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op in ("get_attr", "call_module"))


def _owner(gm: Any) -> Any:
    return getattr(gm, "main_gm", gm)


def _find(holder: Any, name: str) -> object:
    for leaf in name.split("."):
        holder = getattr(holder, leaf, _GONE)
    return holder


def _is_plain(tensor: torch.Tensor) -> bool:
    is_own = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    return is_own and is_strided and not _torch.is_fake(tensor)


def _mark(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return None
    version = 0 if value.is_inference() else _torch.version_of(value)
    return version, value.data_ptr() if _is_plain(value) else 0


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    if not _is_plain(tensor) or tensor.nbytes > _MOST_KEPT:
        return None
    copy = tensor.detach().clone()
    return copy if _is_plain(copy) else None


def _has_same_bits(copy: torch.Tensor, now: torch.Tensor) -> bool:
    if not _is_plain(now) or (copy.device, copy.dtype) != (now.device, now.dtype):
        return False
    if copy.shape != now.shape:
        return False
    return torch.equal(_bytes(copy), _bytes(now))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a graph and which of its nodes was copied from which.

    Attributes:
        graph: The copy; nodes keep their names and metadata.
        mapping: The node of the copy for each node of the original.
        holder: What an ``IterGraphModule`` keeps its graph in; else the module itself.
        deferred: The deferred regions of an ``IterGraphModule``, by node name.
        is_frozen: Whether no more regions could be moved.
        constants: The tensors and modules that the graph reads by name.
        attributes: All that the module holds by name, read or not.
        held: The nodes that were copied, and what each held: these very objects.
    """

    graph: fx.Graph
    mapping: Mapping[fx.Node, fx.Node]
    holder: Any
    deferred: tuple[Any, ...]
    is_frozen: bool
    constants: Constants
    attributes: Attributes
    held: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(cls, gm: Any, earlier: "Snapshot | None" = None) -> Self:
        """Copy the graph of a graph module, or of an ``IterGraphModule``.

        Args:
            gm: The module.
            earlier: A snapshot of it, whose copy is taken where nothing changed since.
        """
        if earlier is not None and earlier.is_copy_of(gm.graph):
            copy, mapping, held = earlier.graph, earlier.mapping, earlier.held
        else:
            copy, mapping = copy_graph(gm.graph)
            held = held_by(gm.graph)
        deferred = tuple(getattr(gm.graph, "regions", ()))
        is_frozen = getattr(gm.graph, "is_frozen", False)
        holder = getattr(gm, "main_gm", gm)
        kept = Constants.of(gm), Attributes.of(holder)
        return cls(copy, mapping, holder, deferred, is_frozen, *kept, held)

    def is_copy_of(self, graph: fx.Graph) -> bool:
        """Whether a graph has the nodes that were copied, with all that they had."""
        return len(graph.nodes) == len(self.held) and is_held(
            map(_held_by, graph.nodes), self.held
        )

    def restore(self, gm: Any) -> dict[fx.Node, fx.Node]:
        """Give a module back the graph that it had, and what it held by name.

        Returns:
            The node of the snapshot for each node that the module has now.
        """
        if gm is not self.holder:
            gm.main_gm = self.holder
        self.attributes.put_back()
        self.constants.put_back()
        copy, _ = copy_graph(self.graph)
        gm.graph = copy
        if hasattr(gm.graph, "regions"):  # marks that the failed edit set are gone too
            gm.graph.regions[:] = self.deferred
            gm.graph.is_frozen = self.is_frozen
        gm.recompile()
        return dict(zip(gm.graph.nodes, self.graph.nodes, strict=True))

    def map_nodes(self, graph: fx.Graph) -> tuple[fx.Graph, Mapping[fx.Node, fx.Node]]:
        """A graph that was made of the one before, and which of its nodes was which.

        It may be a copy: then nodes are known by their names, or by their places where
        they got other names. One that was traced again has lost what was written on its
        nodes: it comes back as a copy that has this again, as far as nodes are the same.
        """
        mapping = self._find_nodes(graph)
        had, has = roles_of(self.graph), roles_of(graph)
        has_none = all(role.kind is OutputKind.RESULT for role in has)
        is_without = had != has and len(had) == len(has) and has_none
        if not is_without and not any(map(_has_lost, mapping, mapping.values())):
            return graph, mapping
        copy, copies = copy_graph(graph)
        mapping = {copies[node]: old for node, old in mapping.items()}
        _fill_in(mapping)
        if is_without:
            set_roles(copy, had)
        return copy, mapping

    def _find_nodes(self, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
        nodes, before = list(graph.nodes), list(self.graph.nodes)
        if list(map(_kind, nodes)) == list(map(_kind, before)) and not (
            {node.name for node in nodes} >= {node.name for node in before}
        ):
            return dict(zip(nodes, before, strict=True))
        by_name = {(node.name, _kind(node)): node for node in before}
        found = {node: by_name.get((node.name, _kind(node))) for node in nodes}
        found |= {node: self.mapping[node] for node in nodes if node in self.mapping}
        known = {node: old for node, old in found.items() if old is not None}
        taken = set(known.values())
        gone = _by_kind(node for node in before if node not in taken)
        new = _by_kind(node for node in nodes if node not in known)
        for kind, alike in new.items():  # such as random ops of a graph traced again
            if len(alike) == len(gone.get(kind, ())):
                known |= zip(alike, gone[kind], strict=True)
        return {node: known[node] for node in nodes if node in known}


def held_by(graph: fx.Graph) -> tuple[tuple[Any, ...], ...]:
    """The nodes of a graph, and what each holds: these very objects."""
    return tuple(map(_held_by, graph.nodes))


def is_held(one: Iterable[tuple[Any, ...]], other: Iterable[tuple[Any, ...]]) -> bool:
    """Whether graphs of equally many nodes have the same nodes, with the same objects."""
    return all(
        len(a) == len(b) and all(map(operator.is_, a, b))
        for a, b in zip(one, other, strict=True)
    )


def _held_by(node: fx.Node) -> tuple[Any, ...]:
    # An edit replaces what it changes: arguments cannot be written into.
    meta = node.meta
    taken = (node.target, node.args, node.kwargs)
    return (node, node.name, *taken, len(meta), *meta.values())


def num_changes(before: fx.Graph, after: fx.Graph) -> int:
    """Nodes that are new, gone, moved, or take other arguments.

    >>> before = fx.symbolic_trace(lambda x: x + 1).graph
    >>> after = fx.symbolic_trace(lambda x: x + 2).graph
    >>> num_changes(before, before), num_changes(before, after)
    (0, 2)
    """
    old = [_facts(node) for node in before.nodes]
    new = [_facts(node) for node in after.nodes]
    if old == new:
        return 0
    is_moved = sorted(old) == sorted(new)
    return 1 if is_moved else max(1, len(set(old) ^ set(new)))


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy with the same names and metadata, and its node for each original one."""
    copy = fx.Graph()
    return copy, copy_nodes(graph, copy)


def _facts(node: fx.Node) -> tuple[str, str, str, str]:
    return node.name, str(node.target), str(node.args), str(node.kwargs)


def _kind(node: fx.Node) -> tuple[str, Any]:
    return node.op, node.target


def _by_kind(nodes: Iterable[fx.Node]) -> dict[Any, list[fx.Node]]:
    found: dict[Any, list[fx.Node]] = {}
    for node in nodes:
        found.setdefault(_kind(node), []).append(node)
    return found


def _has_lost(node: fx.Node, old: fx.Node) -> bool:
    return "val" in old.meta and "val" not in node.meta


def _fill_in(mapping: Mapping[fx.Node, fx.Node]) -> None:
    """Write on nodes what they lost, where they and all that they take are as before."""
    same: set[fx.Node] = set()
    for node, old in mapping.items():
        taken = fx.node.map_arg((node.args, node.kwargs), mapping.get)
        is_same = same.issuperset(node.all_input_nodes)
        if is_same and repr(taken) == repr((old.args, old.kwargs)):
            same.add(node)
            if _has_lost(node, old):
                node.meta = {**old.meta, **node.meta}
