"""One step of two recordings: every value of the one against the other."""

from dataclasses import dataclass, field

import torch

from torchspmd.verify.parity.calls import merge_calls, num_model_calls
from torchspmd.verify.parity.culprit import Result, Status
from torchspmd.verify.parity.history import History
from torchspmd.verify.parity.match import (
    Match,
    find_match,
    largest,
    sharpen,
    whole_values,
)
from torchspmd.verify.parity.order import execution_order
from torchspmd.verify.parity.parts import Parts, find_parts, join_parts
from torchspmd.verify.parity.reference import reference_value
from torchspmd.verify.parity.tolerance import Tolerance
from torchspmd.verify.parity.vacuous import Watch
from torchspmd.verify.recording.files import INITIAL, Key, Kind, Piece, Recording
from torchspmd.verify.recording.sketch import sketch

# Kinds whose agreement is the verdict; the others tell where a difference begins.
RESULTS = (
    Kind.LOSS,
    Kind.OUTPUT,
    Kind.GRADIENT,
    Kind.PARAMETER,
    Kind.BUFFER,
    Kind.STATE,
)
_BACKWARD = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)


@dataclass(frozen=True, slots=True)
class Sides:
    """The two recordings, how they are judged, and what earlier steps left to know."""

    reference: Recording
    parallel: Recording
    tolerance: Tolerance
    rounding: float  # the relative size of rounding, also where every bit must be equal
    history: History = field(default_factory=History)
    watch: Watch = field(default_factory=Watch)
    parts: Parts = field(default_factory=dict)


class StepComparison:
    """Compares one step; afterwards ``references`` has the whole values of one device."""

    def __init__(self, sides: Sides, step: int) -> None:
        self.references: dict[Key, torch.Tensor] = {}
        self.notes: list[str] = []
        self._sides, self._step = sides, step
        self._left = sides.reference.read_step(step)
        self._right = sides.parallel.read_step(step)
        if sides.parallel.first.data_axes and num_model_calls(self._left[0]) > 1:
            self._left = [merge_calls(pieces) for pieces in self._left]
            self._right = [merge_calls(pieces) for pieces in self._right]
        self._sizes: dict[str, float] = {}
        self._gradient_scale = 1

    def run(self) -> list[Result]:
        """Compare everything that the reference recorded, in its order."""
        self._read_references()
        if self._step == INITIAL:
            self._sides.parts.update(find_parts(self.references, self._right))
        self._gradient_scale = self._find_gradient_scale()
        orders = execution_order(self._left[0])
        self._note_extra()
        return [self._compare(key, orders[key]) for key in self._left[0]]

    def _note_extra(self) -> None:
        known = {part for names in self._sides.parts.values() for part in names}
        extra = [
            key.name
            for key in self._right[0]
            if key.kind is Kind.PARAMETER
            and key not in self._left[0]
            and key.name not in known
        ]
        if extra:
            self.notes.append(f"only the parallel run has {', '.join(extra)}")

    def _read_references(self) -> None:
        header = self._sides.reference.first
        for key in self._left[0]:
            pieces = [rank[key] for rank in self._left if key in rank]
            value = reference_value(key, pieces, header)
            if value is None:
                continue
            self.references[key] = value
            self._sides.watch.note(self._step, key, value)
            family = _family(key)
            if value.numel() and family:
                size = largest(value)
                self._sizes[family] = max(self._sizes.get(family, 0.0), size)
        for key, value in self.references.items():
            if self._left[0][key].is_sketch:
                continue
            if key.kind is Kind.GRADIENT:
                noise = self._sides.rounding * 3.0**self._step * self._sizes["gradient"]
                self._sides.history.note_gradient(key.name, value, noise)
                known = self._sides.watch.noise.get(key.name, 0.0)
                self._sides.watch.noise[key.name] = max(known, noise)
            elif key.kind is Kind.PARAMETER:
                self._sides.history.note_value(key.name, value)

    def _limit(self) -> float:
        return self._sides.tolerance.at(max(self._step, 0))

    def _compare(self, key: Key, order: float) -> Result:
        pieces = [rank[key] for rank in self._right if key in rank]
        values = join_parts(key, self._sides.parts, self._right)
        if values is None and len(pieces) < len(self._right):
            status = Status.DIFFERS if self._is_visible(key) else Status.UNKNOWN
            return Result(
                key, order, status, float("inf"), self._limit(), note="missing"
            )
        values = whole_values(pieces) if values is None else values
        reference = self.references.get(key)
        if values is None or reference is None:
            return self._unknown(key, order, "parts do not make a whole")
        if key.kind is Kind.GRADIENT:
            for value in values:
                self._sides.history.note_found(key.name, reference, value)
        values, reference = _comparable(values, pieces, reference, self._left[0][key])
        match = self._match(key, values, reference, pieces)
        if match is None:
            shapes = f"shape {tuple(values[0].shape)} on rank 0, "
            shapes += f"{tuple(reference.shape)} on one device"
            return self._unknown(key, order, shapes)
        size = largest(reference)
        relative = match.error / size if size else match.error
        status = Status.AGREES if match.agrees else Status.DIFFERS
        return Result(key, order, status, relative, self._limit(), match)

    def _is_visible(self, key: Key) -> bool:
        """Whether the parallel run would have recorded such a value."""
        header = self._sides.parallel.first
        if key.kind is Kind.GRADIENT:
            return header.sees_gradients
        if key.kind in _BACKWARD:  # where forward was seen, backward would be
            return key._replace(kind=Kind.FORWARD, leaf=0) in self._right[0]
        return key.kind in RESULTS

    def _unknown(self, key: Key, order: float, note: str) -> Result:
        status = Status.DIFFERS if key.kind in RESULTS else Status.UNKNOWN
        return Result(key, order, status, float("inf"), self._limit(), note=note)

    def _match(
        self,
        key: Key,
        values: tuple[torch.Tensor, ...],
        reference: torch.Tensor,
        pieces: list[Piece],
    ) -> Match | None:
        header = self._sides.parallel.first
        allowed = self._allowed(key, reference)
        if key.kind in _BACKWARD and self._gradient_scale != 1:
            values = tuple(value / self._gradient_scale for value in values)
        match = find_match(values, reference, allowed, header.grid, self._blocks())
        if match is None or match.agrees:
            return match
        if key.kind is Kind.LOSS and header.data_axes:
            return find_match(self._reduced(values), reference, allowed, header.grid)
        if key.kind in _BACKWARD and header.data_axes:
            # What has no rows gets its gradient from all rows: reduced with the others.
            summed = find_match(self._summed(values), reference, allowed, header.grid)
            if summed is not None and summed.agrees:
                return summed
        return sharpen(match, allowed, header.grid, pieces) if pieces else match

    def _summed(self, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """For each rank the sum over the ranks that have other rows."""
        header = self._sides.parallel.first
        teams = [
            header.grid.along(rank, header.data_axes) for rank in range(len(values))
        ]
        if len({value.shape for value in values}) > 1:
            return values
        return tuple(
            torch.stack([values[other].double() for other in team]).sum(0)
            for team in teams
        )

    def _reduced(self, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The whole loss, from the losses of ranks with different rows."""
        header = self._sides.parallel.first
        size = header.grid.size(header.data_axes)
        divisor = size if header.loss_reduction == "mean" else 1
        return tuple(value / divisor for value in self._summed(values))

    def _allowed(self, key: Key, reference: torch.Tensor) -> torch.Tensor:
        if self._sides.tolerance.is_bitwise or not reference.is_floating_point():
            return torch.zeros((), dtype=torch.float64)
        size = largest(reference)
        size = max(size, self._sizes.get(_family(key), 0.0))
        allowed = torch.tensor(self._limit() * size, dtype=torch.float64)
        if key.kind is Kind.PARAMETER:
            return allowed + self._sides.history.allowance(key.name, reference)
        return allowed

    def _blocks(self) -> tuple[int, ...]:
        """Rows of the batch: flattened with the sequence, its shards lie in blocks."""
        inputs = (
            p for k, p in self._right[0].items() if k.kind is Kind.INPUT and p.shape
        )
        first = next(inputs, None)
        return (first.shape[0],) if first is not None and first.shape[0] > 3 else ()

    def _find_gradient_scale(self) -> int:
        """How much larger gradients of activations are on a rank than on one device.

        Where each rank's loss is the mean of its own rows, the reduction of gradients
        divides by the number of ranks, and until then they are larger by it.
        """
        header = self._sides.parallel.first
        size = header.grid.size(header.data_axes) if header.data_axes else 1
        key = next((k for k in self._left[0] if k.kind is Kind.GRAD_OUTPUT), None)
        if size == 1 or key is None or key not in self.references:
            return 1
        pieces = [rank[key] for rank in self._right if key in rank]
        values = whole_values(pieces) if len(pieces) == len(self._right) else None
        if values is None or pieces[0].is_sketch:
            return 1
        errors = {}
        for scale in (1, size):
            scaled = tuple(value / scale for value in values)
            zero = torch.zeros((), dtype=torch.float64)
            match = find_match(scaled, self.references[key], zero, header.grid)
            errors[scale] = float("inf") if match is None else match.error
        return min(errors, key=lambda scale: errors[scale])


def _comparable(
    values: tuple[torch.Tensor, ...],
    pieces: list[Piece],
    reference: torch.Tensor,
    left: Piece,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Both sides as sketches where one of them is."""
    is_sketch = bool(pieces) and pieces[0].is_sketch
    if is_sketch and not left.is_sketch and left.shape == pieces[0].shape:
        return values, sketch(reference, left.shape)
    if left.is_sketch and not is_sketch:
        small = [
            sketch(value, left.shape) if tuple(value.shape) == left.shape else value
            for value in values
        ]
        return tuple(small), reference
    return values, reference


def _family(key: Key) -> str:
    """Values whose rounding has one size: they are sums of terms of any size."""
    if key.kind is Kind.GRADIENT:
        return "gradient"
    if key.kind in _BACKWARD:
        return "gradient of an activation"
    if key.kind is Kind.STATE:
        return f"state {key.name.rpartition('.')[2]}"
    return ""
