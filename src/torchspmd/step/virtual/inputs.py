"""What virtual ranks work on: equal state, batches of their own.

From a real call, rank 0 has the call's values; another rank's batch has the same numbers
in another order, floats scaled, so that indices stay valid and sums differ between ranks.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from torchspmd import _torch
from torchspmd.comm import Kind
from torchspmd.errors import UsageError
from torchspmd.step.capture.inventory import Role
from torchspmd.step.graph.memory import ROLE_KEY
from torchspmd.step.graph.metadata import written_state
from torchspmd.step.virtual.ranks import RankLayout, collective

_PLACES = 1_000_003  # spreads seeds: steps, ranks and places must not meet


class Inputs:
    """The inputs of each virtual rank at each step.

    Args:
        graph: One rank's program.
        layout: The virtual ranks.
        call: Flat inputs of a real call; values are made up from shapes without.
        seed: Decides what is made up.
    """

    def __init__(
        self,
        graph: fx.Graph,
        layout: RankLayout,
        call: Sequence[Any] | None = None,
        seed: int = 0,
    ) -> None:
        self._layout, self._seed = layout, seed
        placeholders = graph.find_nodes(op="placeholder")
        state = set(written_state(graph).values())
        self._base = list(call) if call is not None else []
        if call is None:
            self._base = [
                _make_up(node, node in state, seed + place)
                for place, node in enumerate(placeholders)
            ]
        self._spread = [
            spread_of(graph, layout, node, node in state) for node in placeholders
        ]

    def at(self, step: int, rank: int) -> list[Any]:
        """The inputs of one rank; tensors of their own, which a graph may write into."""
        place = self._layout.coordinates(rank)
        return [
            self._value(index, step, place, axes)
            for index, axes in enumerate(self._spread)
        ]

    def _value(
        self,
        index: int,
        step: int,
        place: tuple[int, ...],
        axes: tuple[int, ...] | None,
    ) -> Any:
        base = self._base[index]
        if not isinstance(base, torch.Tensor):
            return base
        if axes is None:
            return in_layout_of(base, base.detach())
        own = [place[axis] for axis in axes]
        line = _line(own, [self._layout.axes[axis].size for axis in axes])
        batch = len(axes) == len(self._layout.axes)
        number = line + (step * self._layout.size if batch else 0)
        if number == 0:
            return in_layout_of(base, base.detach())
        return _vary(base.detach(), self._seed + number * _PLACES + index)


def spread_of(
    graph: fx.Graph, layout: RankLayout, node: fx.Node, is_state: bool
) -> tuple[int, ...] | None:
    """The axes along which ranks hold other values of an input; None for equal ones.

    Batches differ everywhere; state only where it is a shard that the graph gathers.
    """
    role = node.meta.get(ROLE_KEY)
    if role == Role.INPUT.value or (role is None and not is_state):
        return tuple(range(len(layout.axes)))
    return _gathered_over(layout, node)


_PASSED_ON = frozenset(
    {
        "aten::view", "aten::reshape", "aten::_unsafe_view", "aten::clone",
        "aten::_to_copy", "aten::constant_pad_nd", "aten::cat", "aten::slice",
        "aten::t", "aten::transpose",
    }
)  # fmt: skip


def _gathered_over(layout: RankLayout, node: fx.Node) -> tuple[int, ...] | None:
    """The axes over which a placeholder is gathered, through views and copies."""
    waiting = list(node.users)
    while waiting:
        user = waiting.pop()
        found = collective(user)
        if found is not None and found[0].kind is Kind.ALL_GATHER:
            return layout.groups[found[1]["group_name"]]
        target = user.target
        if isinstance(target, _torch.OpOverload):
            if _torch.packet_name(target) in _PASSED_ON:
                waiting += list(user.users)
    return None


def _line(place: Sequence[int], sizes: Sequence[int]) -> int:
    number = 0
    for coordinate, size in zip(place, sizes, strict=True):
        number = number * size + coordinate
    return number


def _vary(base: torch.Tensor, seed: int) -> torch.Tensor:
    """The same numbers in another order, floats scaled by a half to three halves."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(base.numel(), generator=generator).to(base.device)
    varied = base.reshape(-1)[order].reshape(base.shape)
    if base.is_floating_point():
        scale = torch.rand(base.shape, generator=generator, dtype=torch.float64) + 0.5
        varied = (varied * scale.to(base.device)).to(base.dtype)
    return in_layout_of(base, varied)


def in_layout_of(held: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A copy of values with the strides and the dtype of the tensor that holds them.

    Kernels choose by strides: a value in another layout may give other bits.

    >>> in_layout_of(torch.zeros(2, 4)[:, ::2], torch.ones(2, 2)).stride()
    (4, 2)
    """
    if held.layout is not torch.strided:
        return values.clone()
    pairs = zip(held.shape, held.stride(), strict=True)
    if any(size > 1 and step == 0 for size, step in pairs):
        return values.to(held.dtype, copy=True)  # nothing can be written there
    made = torch.empty_strided(
        held.shape, held.stride(), dtype=held.dtype, device=held.device
    )
    return made.copy_(values)


def _make_up(node: fx.Node, is_state: bool, seed: int) -> Any:
    """A value for a placeholder, from the shape and dtype in its metadata."""
    meta = node.meta.get("val")
    if meta is None:
        raise UsageError(
            f"virtual ranks: {node.name} has no shape in its metadata to make a value "
            "from. Pass inputs=."
        )
    if not isinstance(meta, torch.Tensor):
        return _torch.number_hint(meta)
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(map(_torch.size_hint, meta.shape))
    if meta.is_floating_point():
        if is_state or node.meta.get(ROLE_KEY) not in (None, Role.INPUT.value):
            # Not negative and not zero: it may be a variance or a counter.
            values = 0.1 + torch.rand(shape, generator=generator) / math.sqrt(10)
            values = torch.ones(()) if not shape else values
        else:
            values = torch.randn(shape, generator=generator)
    else:
        values = torch.randint(0, 2, shape, generator=generator)
    made = torch.empty_strided(
        shape,
        tuple(map(_torch.size_hint, meta.stride())),
        dtype=meta.dtype,
        device=meta.device,
    )
    return made.copy_(values)
