"""One step of two recordings: every value of the one against the other."""

import math
from dataclasses import dataclass, field

import torch

from torchspmd.layout.rounding import Tolerance
from torchspmd.verify.parity.match import (
    Match,
    find_match,
    largest,
    match_by_shard,
    sums_along,
    whole_values,
)
from torchspmd.verify.parity.origin import BACKWARD, Result, Status, execution_order
from torchspmd.verify.parity.vacuous import Watch
from torchspmd.verify.parity.wholes import (
    Parts,
    find_parts,
    join_parts,
    merge_calls,
    num_model_calls,
    reference_value,
)
from torchspmd.verify.recording.files import (
    INITIAL,
    Key,
    Kind,
    Piece,
    Recording,
    module_of,
)
from torchspmd.verify.recording.layouts import sketch

# ----------------------------------------------------------------------------
# How much an updated parameter may differ, given how sure its gradients are.
#
# An optimizer such as Adam divides by the size of the gradient: where a gradient is zero
# but for rounding (a bias before a norm, a key's bias), its step has full size and any
# sign. The relative error of a step is at most that of its gradient, so each element is
# allowed the size of the updates so far times the relative error of its gradient.


@dataclass(slots=True)
class History:
    """What is known of each parameter from the steps before."""

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    uncertainty: dict[str, torch.Tensor] = field(default_factory=dict)
    moved: dict[str, float] = field(default_factory=dict)

    def note_gradient(self, name: str, gradient: torch.Tensor, noise: float) -> None:
        """Remember the relative error of each element of a gradient, at most 1."""
        size = gradient.double().abs()
        uncertainty = torch.where(size > 0, noise / size, 0.0).clamp(max=1.0)
        known = self.uncertainty.get(name)
        if known is not None and known.shape == uncertainty.shape:
            uncertainty = torch.maximum(known, uncertainty)
        self.uncertainty[name] = uncertainty

    def note_found(
        self, name: str, gradient: torch.Tensor, found: torch.Tensor
    ) -> None:
        """A zero gradient that is not zero in the parallel run is uncertain: rounding."""
        uncertainty = self.uncertainty.get(name)
        if uncertainty is not None and uncertainty.shape == found.shape:
            uncertainty[(gradient == 0) & (found != 0)] = 1.0

    def note_value(self, name: str, value: torch.Tensor) -> None:
        """Remember a parameter's value after a step, and how far it moved."""
        before = self.values.get(name)
        if before is not None and before.shape == value.shape and value.numel():
            step = largest(value.double() - before.double())
            self.moved[name] = self.moved.get(name, 0.0) + step
        self.values[name] = value

    def allowance(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """What each element may differ on top of rounding; twice, for a change of sign.

        Where the gradient is nothing but rounding, its step may have any size that steps
        have at all.
        """
        uncertainty = self.uncertainty.get(name)
        if uncertainty is None or uncertainty.shape != like.shape:
            return torch.zeros((), dtype=torch.float64)
        own, any_step = self.moved.get(name, 0.0), max(self.moved.values(), default=0.0)
        return 2 * torch.where(uncertainty < 1, own * uncertainty, any_step)


# Kinds whose agreement is the verdict; the others tell where a difference begins.
RESULTS = (
    Kind.LOSS,
    Kind.OUTPUT,
    Kind.GRADIENT,
    Kind.PARAMETER,
    Kind.BUFFER,
    Kind.STATE,
)


@dataclass(frozen=True, slots=True)
class Sides:
    """The two recordings, the tolerance, and what earlier steps found."""

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
        self._note_extra_parameters()
        return [
            *(self._compare(key, orders[key]) for key in self._left[0]),
            *(
                Result(
                    key, math.inf, Status.DIFFERS, math.inf, self._limit(), note="extra"
                )
                for key in self._extra_states()
            ),
        ]

    def _extra_states(self) -> list[Key]:
        """Optimizer states that only the parallel run has, of parameters of both."""
        return [
            key
            for key in self._right[0]
            if key.kind is Kind.STATE
            and key not in self._left[0]
            and Key(Kind.PARAMETER, module_of(key.name)) in self._left[0]
        ]

    def _note_extra_parameters(self) -> None:
        known = {part for _, names in self._sides.parts.values() for part in names}
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
        if key.kind in BACKWARD:  # where forward was seen, backward would be
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
        if key.kind in BACKWARD and self._gradient_scale != 1:
            values = tuple(value / self._gradient_scale for value in values)
        match = find_match(values, reference, allowed, header.grid, self._blocks())
        if match is None or match.agrees:
            return match
        if key.kind is Kind.LOSS and header.data_axes:
            return find_match(self._reduced(values), reference, allowed, header.grid)
        if key.kind in BACKWARD and header.data_axes:
            # What has no rows gets its gradient from all rows: reduced with the others.
            summed = find_match(self._summed(values), reference, allowed, header.grid)
            if summed is not None and summed.agrees:
                return summed
        return match_by_shard(match, allowed, header.grid, pieces) if pieces else match

    def _summed(self, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """For each rank the sum over the ranks that have other rows."""
        header = self._sides.parallel.first
        sums = sums_along(values, header.grid, header.data_axes)
        return values if sums is None else tuple(sums)

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
        if key.kind is Kind.LOSS:
            return allowed + self._limit() * self._size_of_terms()
        return allowed

    def _size_of_terms(self) -> float:
        """How far rounding of the model's outputs moves the loss.

        A loss may be close to zero and still be a sum of large terms, which cancel: to
        first order it moves by its gradients times what the outputs move by.
        """
        size = 0.0
        for key, gradient in self.references.items():
            if key.kind is Kind.GRAD_OUTPUT and not key.name:
                output = self.references.get(key._replace(kind=Kind.FORWARD))
                norm = float(torch.linalg.vector_norm(gradient.double()))
                if output is not None and math.isfinite(norm):
                    size += norm * largest(output)
        return size

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
    if key.kind in BACKWARD:
        return "gradient of an activation"
    if key.kind is Kind.STATE:
        return f"state {key.name.rpartition('.')[2]}"
    return ""
