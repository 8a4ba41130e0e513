"""What each collective does, computed from the values of all ranks of a group."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.errors import VirtualRanksError
from torchspmd.step.graph.reduction_order import reduce_values

Arguments = dict[str, Any]  # of one rank, by name


class InFlight:
    """The result of a collective, which may be read after a wait only."""

    __slots__ = ("is_done", "value")

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value
        self.is_done = False


def wait(value: Any) -> Any:
    """What a wait gives: the result, which from now on may be read."""
    if isinstance(value, InFlight):
        value.is_done = True
        return value.value
    return value


def communicate(
    node: fx.Node, arguments: list[Any], teams: list[list[int]], order: str
) -> list[Any]:
    """The results of a collective on all ranks, from each rank's arguments.

    Args:
        node: The collective.
        arguments: Each rank's positional and keyword arguments.
        teams: The sets of ranks that communicate, each in group order.
        order: The order of reductions.
    """
    assert isinstance(node.target, _torch.OpOverload), node.target
    namespace, _, name = _torch.packet_name(node.target).partition("::")
    run = _RUN.get(name.removesuffix("_out").removesuffix("_"))
    if run is None or namespace not in _NAMESPACES:
        raise VirtualRanksError(
            f"virtual ranks: {node.name} ({node.target}) is a communication that they "
            "do not know; run this step on real ranks."
        )
    names = _torch.argument_names(node.target)
    by_name = [
        {**dict(zip(names, args, strict=False)), **kwargs} for args, kwargs in arguments
    ]
    results: list[Any] = [None] * len(arguments)
    for team in teams:
        found = run(_Team([by_name[rank] for rank in team], order))
        for rank, value in zip(team, found, strict=True):
            written = by_name[rank] if name.endswith("_") else None
            if name.endswith("_out"):
                written = {"input": by_name[rank]["out"]}
            is_whole = namespace == "_dtensor"  # waits by itself
            results[rank] = value if is_whole else _all_in_flight(value, written)
    return results


def _all_in_flight(value: Any, written: Arguments | None) -> Any:
    if isinstance(value, list):
        targets = [None] * len(value) if written is None else written["inputs"]
        return [_in_flight(v, t) for v, t in zip(value, targets, strict=True)]
    return _in_flight(value, None if written is None else written["input"])


def _in_flight(value: torch.Tensor, target: torch.Tensor | None) -> InFlight:
    # An in-place form puts the result into its own argument.
    return InFlight(value if target is None else target.copy_(value))


# ----------------------------------------------------------------------------
# What each collective gives to the ranks of a group, from their arguments in group order.


@dataclass(frozen=True, slots=True)
class _Team:
    """The ranks of a group, each with its arguments, and the order of reductions."""

    ranks: list[Arguments]
    order: str

    @property
    def inputs(self) -> list[torch.Tensor]:
        return [rank["input"] for rank in self.ranks]

    def with_inputs(self, values: Iterable[torch.Tensor]) -> "_Team":
        pairs = zip(self.ranks, values, strict=True)
        return replace(self, ranks=[{**rank, "input": value} for rank, value in pairs])

    def reduce(self, values: list[torch.Tensor]) -> torch.Tensor:
        return reduce_values(values, self.ranks[0]["reduce_op"], self.order)


_Run = Callable[[_Team], list[Any]]


def _all_reduce(team: _Team) -> list[Any]:
    total = team.reduce(team.inputs)
    return [total.clone() for _ in team.ranks]


def _all_reduce_coalesced(team: _Team) -> list[Any]:
    """As gloo does: one buffer of all tensors, so a ring's chunks cross their borders."""
    shapes = [tensor.shape for tensor in team.ranks[0]["inputs"]]
    flat = [torch.cat([t.reshape(-1) for t in rank["inputs"]]) for rank in team.ranks]
    parts = team.reduce(flat).split([shape.numel() for shape in shapes])
    return [
        [part.clone().view(shape) for part, shape in zip(parts, shapes, strict=True)]
        for _ in team.ranks
    ]


def _all_gather(team: _Team) -> list[Any]:
    values = team.inputs
    whole = torch.stack(values) if values[0].ndim == 0 else torch.cat(values)
    return [whole.clone() for _ in team.ranks]


def _reduce_scatter(team: _Team) -> list[Any]:
    """As gloo does: the whole buffer is reduced, and each rank keeps its part."""
    total = team.reduce(team.inputs)
    return [part.clone() for part in total.split(total.shape[0] // len(team.ranks))]


def _all_to_all(team: _Team) -> list[Any]:
    sent = [list(rank["input"].split(rank["input_split_sizes"])) for rank in team.ranks]
    results = []
    for place, rank in enumerate(team.ranks):
        parts = [from_one[place] for from_one in sent]
        expected = list(rank["output_split_sizes"])
        if [len(part) for part in parts] != expected:
            raise VirtualRanksError(
                f"virtual ranks: an all-to-all sends {[len(p) for p in parts]} rows to "
                f"rank {place} of the group, which expects {expected}."
            )
        results.append(torch.cat(parts))
    return results


def _shard_dim_all_to_all(team: _Team) -> list[Any]:
    given = team.ranks[0]
    parts = [each.chunk(len(team.ranks), given["shard_dim"]) for each in team.inputs]
    return [
        torch.cat(column, given["gather_dim"]) for column in zip(*parts, strict=True)
    ]


def _broadcast(team: _Team) -> list[Any]:
    source = team.inputs[team.ranks[0]["src"]]
    return [source.clone() for _ in team.ranks]


def _item_by_item(run: _Run) -> _Run:
    """A coalesced collective, which does the same to each tensor of a list."""

    def coalesced(team: _Team) -> list[Any]:
        items = zip(*(rank["inputs"] for rank in team.ranks), strict=True)
        columns = [run(team.with_inputs(item)) for item in items]
        places = range(len(team.ranks))
        return [[column[place] for column in columns] for place in places]

    return coalesced


_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_RUN: dict[str, _Run] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_coalesced": _item_by_item(_all_gather),
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _item_by_item(_reduce_scatter),
    "all_to_all_single": _all_to_all,
    "shard_dim_alltoall": _shard_dim_all_to_all,
    "broadcast": _broadcast,
}
