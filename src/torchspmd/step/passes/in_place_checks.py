"""What an operator's in-place form would write, and what speaks against it."""

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.step.graph.aliases import Aliases, operator_of


@dataclass(frozen=True, slots=True)
class Write:
    """One tensor that an in-place form writes, and the node of its new value.

    ``place`` is its place in the list that it stands in, or -1.
    """

    target: fx.Node
    out: fx.Node | None
    place: int = -1


def find_writes(node: fx.Node) -> tuple[Write, ...]:
    """What a node's in-place form would write; nothing where it has none."""
    form = _torch.in_place_form(operator_of(node))
    if form is None:
        return ()
    if isinstance(node.args[0], fx.Node):
        return (Write(node.args[0], node),)
    if not isinstance(node.args[0], (list, tuple)):
        return ()  # 2 ** x: the number is no memory
    return tuple(_list_writes(node, _torch.written_arguments(form)))


def _list_writes(node: fx.Node, places: tuple[int, ...]) -> Iterator[Write]:
    """The lists of ``_foreach_add`` or ``_fused_adam``, tensor by tensor."""
    results = _items(node)
    for number, place in enumerate(places):
        if place == 1 and node.kwargs.get("grad_scale") is None:
            continue  # a fused optimizer writes gradients only where it unscales them
        if len(places) > 1:
            whole = results.get(number)
            outs = {} if whole is None else _items(whole)
        else:
            outs = results
        tensors = node.args[place]
        assert isinstance(tensors, (list, tuple)), type(tensors)
        for index, tensor in enumerate(tensors):
            assert isinstance(tensor, fx.Node), type(tensor)
            yield Write(tensor, outs.get(index), index)


def _items(node: fx.Node) -> dict[Any, fx.Node]:
    return {
        user.args[1]: user for user in node.users if user.target is operator.getitem
    }


def find_obstacle(
    node: fx.Node,
    writes: tuple[Write, ...],
    aliases: Aliases,
    scratch: Collection[fx.Node] = (),
) -> str | None:
    """Why a node must not write in place, as far as it alone can be judged."""
    is_list = not isinstance(node.args[0], fx.Node)
    if is_list and len(_items(node)) != len(node.users):
        return "its results are not taken one by one"
    form = _torch.in_place_form(operator_of(node))
    is_fused = len(_torch.written_arguments(form)) > 1
    if is_fused and _hands_gradients_on(node):
        return "the gradients that it hands on are used"
    read_at = _places_of_arguments(node, aliases)
    for write in writes:
        root = aliases.root[write.target]
        if write.out is None and not is_fused:
            return "not all of its results are used"
        reason = _memory_obstacle(write, root, aliases, scratch)
        if reason is None and aliases.last_read[root] > aliases.position[node]:
            reason = f"{write.target.name} is read later"
        if reason is None and not _reads_itself_only(write, read_at[root], is_fused):
            reason = f"{write.target.name} is read through another argument too"
        if reason is not None:
            return reason
    return None


def _hands_gradients_on(node: fx.Node) -> bool:
    gradients = _items(node).get(1)
    return gradients is not None and any(item.users for item in gradients.users)


def _memory_obstacle(
    write: Write, root: fx.Node, aliases: Aliases, scratch: Collection[fx.Node]
) -> str | None:
    if root in aliases.pinned or root.op not in ("placeholder", "call_function"):
        return f"{root.name} is a constant, or used in a way that is not known"
    is_input = root.op == "placeholder" and root not in scratch
    if write.target is not root and is_input:
        return f"{write.target.name} is a view of an input"
    if write.out is not None and not same_form(write.target, write.out):
        return f"{write.out.name} has another shape, layout or dtype"
    value, base = write.target.meta.get("val"), root.meta.get("val")
    if not isinstance(value, torch.Tensor) or not isinstance(base, torch.Tensor):
        return f"the layout of {write.target.name} is not known"
    if overlaps_itself(value):
        return f"{write.target.name} has several elements in one place"
    if base.numel() != value.numel():
        return f"{write.target.name} is a part of another tensor"
    return None


def _places_of_arguments(
    node: fx.Node, aliases: Aliases
) -> dict[fx.Node, list[tuple[fx.Node, int]]]:
    """For each memory, which arguments lie in it and at which places of their lists."""
    found: dict[fx.Node, list[tuple[fx.Node, int]]] = {}
    for argument in (*node.args, *node.kwargs.values()):
        is_list = isinstance(argument, (list, tuple))
        items: Any = argument if is_list else [argument]
        for place, item in enumerate(items):
            if isinstance(item, fx.Node):
                entry = (item, place if is_list else -1)
                found.setdefault(aliases.root[item], []).append(entry)
    return found


def _reads_itself_only(
    write: Write, arguments: list[tuple[fx.Node, int]], is_fused: bool
) -> bool:
    """Whether the memory is read at the element that is written, and nowhere else."""
    if is_fused and len(arguments) > 1:
        return False
    return all(
        item is write.target and place == write.place for item, place in arguments
    )


def same_form(one: fx.Node, other: fx.Node) -> bool:
    """Whether two values have the same shape, dtype, device and strides."""
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    same_type = a.dtype == b.dtype and a.device == b.device
    return same_type and a.shape == b.shape and a.stride() == b.stride()


def overlaps_itself(value: torch.Tensor) -> bool:
    """Whether several elements lie in one place, as after ``expand``."""
    pairs = zip(value.shape, value.stride(), strict=True)
    return any(size > 1 and step == 0 for size, step in pairs)
