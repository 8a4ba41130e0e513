"""Tensors of a step that lie in the same memory: a functional graph pulls them apart.

Whoever reads one of them after the step wrote another would get the old values. Tensors
that are only read may share whatever they like: tokens and their targets are often two
views of one sequence.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from typing import Any, NamedTuple, final

import torch

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.inventory import Inventory, Role


def extent_of(tensor: torch.Tensor) -> Any:
    """How many elements of memory lie from a tensor's first to its last one, or a symbol.

    >>> extent_of(torch.ones(4)), extent_of(torch.ones(4)[::2])
    (4, 3)
    """
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * step for size, step in sizes)


class _Span(NamedTuple):
    """From the first to the last byte of a tensor, and its slot."""

    start: int
    end: int
    slot: int


def _spans(tensors: Sequence[Any], places: Iterable[int]) -> list[_Span]:
    """The spans of these tensors in memory, in order."""
    found = []
    for place in places:
        tensor = tensors[place]
        if _has_address(tensor) and tensor.numel():
            start = tensor.data_ptr()
            end = start + extent_of(tensor) * tensor.element_size()
            found.append(_Span(start, end, place))
    return sorted(found)


def _has_address(tensor: torch.Tensor) -> bool:
    is_there = tensor.layout is torch.strided and not tensor.is_meta
    return is_there and not _torch.is_fake(tensor)


def _passing(inventory: Inventory) -> set[int]:
    """Tensors that may be views of others, as long as nobody writes to either.

    Arguments, and tensors in plain attributes and variables.
    """
    slots = enumerate(inventory.slots)
    given = {place for place, slot in slots if slot.role is Role.INPUT}
    in_attributes = (place.slot for place in inventory.places if place.is_attribute)
    return given.union(in_attributes, inventory.held)


def check_memory(inventory: Inventory) -> None:
    """Refuse parameters, buffers and states that share memory, whatever the step does."""
    slots = inventory.slots
    kept = sorted({*range(len(slots))} - _passing(inventory))
    for first, second in pairwise(_spans(inventory.flat_inputs(), kept)):
        if second.start < first.end:
            raise CaptureError(
                f"compile: {slots[first.slot].name} and {slots[second.slot].name} are two "
                "tensors on the same memory, and a graph that writes one would not change "
                "the other. Tie weights by assigning the parameter itself, not its data."
            )


@final
class SharedMemory:
    """Checks, in every call, that nothing a program writes is known by another name.

    Args:
        inventory: What the program was captured for.
        written: The slots that it writes.
        read: The slots that it reads.
    """

    def __init__(
        self, inventory: Inventory, written: Iterable[int], read: Iterable[int]
    ) -> None:
        self._written = frozenset(written)
        tensors = inventory.flat_inputs()
        used = sorted(self._written.union(read))
        used = [place for place in used if _has_address(tensors[place])]
        inputs = _passing(inventory).intersection(used)
        self._inputs = sorted(inputs)
        self._staying = [place for place in used if place not in inputs]
        self._pointers: list[int] = []  # of what stays from call to call, when checked
        self._spans: list[_Span] = []
        self._starts: list[int] = []

    def check(self, inventory: Inventory, tensors: Sequence[Any]) -> None:
        """Raise where a tensor that is written shares memory with one that is used.

        Args:
            inventory: What a call works on.
            tensors: Its plain tensors, by slot.
        """
        pointers = [tensors[place].data_ptr() for place in self._staying]
        if pointers != self._pointers:
            check_memory(inventory)
            self._spans = _spans(tensors, self._staying)
            self._starts = [span.start for span in self._spans]
            self._pointers = pointers
        spans = _spans(tensors, self._inputs)
        for span in spans:
            # Those that stay do not touch each other: in order of their ends, too.
            place = bisect_left(self._starts, span.end) - 1
            while place >= 0 and self._spans[place].end > span.start:
                self._check_pair(inventory, self._spans[place], span)
                place -= 1
        if not self._written.isdisjoint(self._inputs):
            for first, second in combinations(spans, 2):
                if second.start < first.end:
                    self._check_pair(inventory, first, second)

    def _check_pair(self, inventory: Inventory, first: _Span, second: _Span) -> None:
        if self._written.isdisjoint((first.slot, second.slot)):
            return
        if first.slot not in self._written:
            first, second = second, first
        names = [inventory.slots[each.slot].name for each in (first, second)]
        raise CaptureError(
            f"compile: {names[0]} and {names[1]} are two tensors on the same memory, and "
            f"the step writes into {names[0]}: a graph would read the old values of "
            f"{names[1]}. Pass a copy of one of them (clone()), or write into a copy "
            "inside of the step."
        )
