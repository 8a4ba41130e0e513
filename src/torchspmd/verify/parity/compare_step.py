"""One step of two recordings: every value of the one against the other."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import torch

from torchspmd.layout.rounding import Tolerance
from torchspmd.verify.parity.match import (
    Match,
    difference,
    find_match,
    largest,
    match_by_shard,
    whole_values,
)
from torchspmd.verify.parity.vacuous import Watch
from torchspmd.verify.recording.files import (
    INITIAL,
    Header,
    Key,
    Kind,
    Piece,
    Recording,
    module_of,
)
from torchspmd.verify.recording.layouts import sketch

# ----------------------------------------------------------------------------
# Where a difference begins: the first one in execution order that no later value puts
# right.

_FORWARD = (Kind.INPUT, Kind.FORWARD)
_BACKWARD = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
_INSIDE = (*_FORWARD, *_BACKWARD)
_NOISE = 0.1  # of the largest difference of an activation
_MOST = 0.8  # of all parameters: then it is not one module's fault


class Status(Enum):
    """What came out of one comparison."""

    AGREES = "agrees"
    DIFFERS = "differs"
    UNKNOWN = "unknown"  # the shapes allow no comparison


@dataclass(frozen=True, slots=True)
class Result:
    """One compared value."""

    key: Key
    order: float
    status: Status
    relative: float = 0.0
    allowed: float = 0.0
    match: Match | None = None
    note: str = ""


def choose_first(
    results: Sequence[Result], *, is_later: bool = False
) -> tuple[Result, str] | None:
    """The difference that the others follow from, and the place to look at.

    In a later step, small differences of activations are left out beside large ones:
    rounding of earlier updates has come in.
    """
    ordered = sorted(results, key=lambda result: result.order)
    wrong = [
        result
        for result in ordered
        if result.status is Status.DIFFERS and not _is_corrected(result, ordered)
    ]
    if is_later:
        inside = [r.relative for r in wrong if r.key.kind in _INSIDE]
        floor = _NOISE * max((n for n in inside if n < math.inf), default=0.0)
        wrong = [r for r in wrong if r.key.kind not in _INSIDE or r.relative >= floor]
    if not wrong:
        return None
    first = wrong[0]
    place = None
    if not any(result.key.kind in _INSIDE for result in wrong):
        place = _common_place(first, ordered)
    if first.key.kind is Kind.GRAD_OUTPUT:
        place = _where_it_arrived(first, ordered)
    return first, place or place_of(first.key)


def _where_it_arrived(first: Result, ordered: Sequence[Result]) -> str:
    """A gradient arrives wrong at a module: what went wrong is after it.

    One tensor may be the output of a module, of the one around it, and so on; hooks of
    the innermost run first.
    """
    backward = [
        result
        for result in ordered
        if result.key.kind in _BACKWARD and result.status is not Status.UNKNOWN
    ]
    place = backward.index(first)
    is_beginning = place == 0
    name = first.key.name
    for result in backward[place + 1 :]:
        is_around = not result.key.name or name.startswith(f"{result.key.name}.")
        if result.key.kind is not Kind.GRAD_OUTPUT or not is_around:
            break
        if result.status is Status.AGREES:
            break
        name = result.key.name
    if is_beginning or not name:
        return "(loss)"
    return f"{module_of(name) or '(model)'}, after {name}"


def _is_corrected(result: Result, ordered: Sequence[Result]) -> bool:
    """Whether a module around it gives the right value: then it was partial or a shard.

    A layer inside a parallel layer of the user's own may well hold partial sums.
    """
    kind, name = result.key.kind, result.key.name
    if kind not in _INSIDE:
        return False
    wanted = Kind.FORWARD if kind in _FORWARD else Kind.GRAD_INPUT
    while name:
        name = module_of(name)
        later = (
            other
            for other in ordered
            if other.order > result.order and other.key[:2] == (wanted, name)
        )
        around = next(later, None)
        if around is not None and around.status is Status.AGREES:
            return True
    return False


def _common_place(first: Result, ordered: Sequence[Result]) -> str | None:
    """A place for a difference that nearly all parameters share."""
    kind = first.key.kind
    if kind not in (Kind.GRADIENT, Kind.PARAMETER, Kind.STATE):
        return None
    same = [result for result in ordered if result.key.kind is kind]
    wrong = [result for result in same if result.status is Status.DIFFERS]
    modules = {module_of(result.key.name) for result in wrong}
    if len(modules) < 2 or len(wrong) < _MOST * len(same):
        return None
    return "(all parameters)" if kind is Kind.GRADIENT else "(optimizer)"


def place_of(key: Key) -> str:
    """The module that a value belongs to, or a word in brackets.

    >>> place_of(Key(Kind.GRADIENT, "layers.0.up.weight"))
    'layers.0.up'
    """
    kind, name = key.kind, key.name
    if kind is Kind.LOSS or (kind is Kind.GRAD_OUTPUT and not name):
        return "(loss)"
    if kind is Kind.OUTPUT:
        return "(outputs of the step)"
    if kind is Kind.INPUT:
        # Computed between modules, in the code of the one around.
        around = module_of(name) or "(model)"
        return f"{around}, before {name}" if name else "(batch)"
    if kind is Kind.STATE:
        name = module_of(name)
    if kind in (Kind.GRADIENT, Kind.PARAMETER, Kind.BUFFER, Kind.STATE):
        name = module_of(name)
    return name or "(model)"


# ----------------------------------------------------------------------------
# The place of each recorded value in the execution of a step.


def execution_order(keys: Iterable[Key]) -> dict[Key, float]:
    """A number for each value, smaller for what is computed earlier.

    Most are recorded when they are computed. Gradients of parameters are read before the
    update, but belong to the backward of their module; the loss is handed over last, but
    is there before backward begins.
    """
    orders: dict[Key, float] = {key: place for place, key in enumerate(keys)}
    arrived = {k.name: n for k, n in orders.items() if k.kind is Kind.GRAD_OUTPUT}
    first = min((n for k, n in orders.items() if k.kind in _BACKWARD), default=None)
    moved: dict[Key, float] = {}
    for key in orders:
        if key.kind is Kind.GRADIENT:
            module = _nearest(module_of(key.name), arrived)
            if module in arrived:
                moved[key] = arrived[module] + 0.5
        elif key.kind is Kind.LOSS and first is not None:
            moved[key] = first - 0.5
    return orders | moved


def _nearest(module: str, known: dict[str, float]) -> str:
    """The module itself, or the nearest one around it whose backward was seen."""
    while module and module not in known:
        module = module_of(module)
    return module


# ----------------------------------------------------------------------------
# Parameters that the parallel run keeps in parts, such as a fused projection.
#
# No placement describes a fused weight of which each rank holds a piece of every part, so
# parallel layers keep the parts as parameters of their own. Which parts make which
# parameter is read from the initial values.

# A parameter of one device: the dimension of the cut, and the parameters of the ranks.
Parts = dict[str, tuple[int, tuple[str, ...]]]


def find_parts(
    reference: Mapping[Key, torch.Tensor], ranks: Sequence[Mapping[Key, Piece]]
) -> Parts:
    """For each parameter that the ranks do not have: where it was cut, and its parts."""
    missing = [
        key for key in reference if key.kind is Kind.PARAMETER and key not in ranks[0]
    ]
    extra: dict[str, torch.Tensor] = {}
    for key in ranks[0]:
        if missing and key.kind is Kind.PARAMETER and key not in reference:
            values = whole_values([rank[key] for rank in ranks])
            if values is not None:
                extra[key.name] = values[0]
    found = {}
    for key in missing:
        cut = _cut_of(reference[key], _near(key.name, extra))
        if cut is not None:
            found[key.name] = cut
    return found


def _near(name: str, extra: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parts belong to the module of the parameter, or to one inside it."""
    module = module_of(name)
    return {n: v for n, v in extra.items() if module_of(n).startswith(module)}


def _cut_of(
    whole: torch.Tensor, parts: dict[str, torch.Tensor]
) -> tuple[int, tuple[str, ...]] | None:
    """The dimension along which a tensor was cut, and its parts in order."""
    for dim in range(whole.ndim):
        names = _along(whole, parts, dim)
        if names:
            return dim, names
    return None


def _along(
    whole: torch.Tensor, parts: dict[str, torch.Tensor], dim: int
) -> tuple[str, ...] | None:
    names: list[str] = []
    start, size = 0, whole.shape[dim]
    while start < size:
        for name, part in parts.items():
            num = part.shape[dim] if part.ndim == whole.ndim else 0
            is_next = name not in names and 0 < num <= size - start
            if is_next and torch.equal(whole.narrow(dim, start, num), part):
                names.append(name)
                start += num
                break
        else:
            return None
    return tuple(names) or None


def join_parts(
    key: Key, parts: Parts, ranks: Sequence[Mapping[Key, Piece]]
) -> tuple[torch.Tensor, ...] | None:
    """The joined value of each rank, where ranks keep it in parts; else None."""
    name, rest = key.name, ""
    if key.kind is Kind.STATE:
        name, _, rest = key.name.rpartition(".")
    if name not in parts:
        return None
    dim, names = parts[name]
    columns = []
    for part in names:
        wanted = key._replace(name=f"{part}.{rest}" if rest else part)
        if any(wanted not in rank for rank in ranks):
            return None
        values = whole_values([rank[wanted] for rank in ranks])
        if values is None:
            return None
        columns.append(values)
    if not columns[0][0].ndim:  # a counter: each part has its own
        return columns[0]
    if columns[0][0].ndim <= dim:
        return None
    return tuple(torch.cat(each, dim) for each in zip(*columns, strict=True))


# ----------------------------------------------------------------------------
# The whole value of a reference, which may itself be a run on several ranks.


def reference_value(
    key: Key, pieces: list[Piece], header: Header
) -> torch.Tensor | None:
    """One value for all ranks; None where it does not follow from what they hold."""
    if len(pieces) < header.world_size:
        return None
    values = whole_values(pieces)
    if values is None:
        return None
    if all(_same(value, values[0]) for value in values[1:]):
        return values[0]
    return _from_rows(key, values, header)


def _from_rows(
    key: Key, values: tuple[torch.Tensor, ...], header: Header
) -> torch.Tensor | None:
    """Ranks along the data axes have other rows; the others must be equal."""
    grid, axes = header.grid, header.data_axes
    others = [name for name in grid.names if name not in axes]
    if not axes or any(
        not _same(values[rank], values[other])
        for rank in range(len(values))
        for other in grid.along(rank, others)
    ):
        return None
    rows = [values[rank] for rank in grid.along(0, axes)]
    if key.kind is Kind.LOSS or not rows[0].ndim:
        total = torch.stack(rows).sum(0)
        return total / len(rows) if header.loss_reduction == "mean" else total
    if key.kind in _BACKWARD:
        return None  # their scale is not known
    if key.kind in (Kind.INPUT, Kind.FORWARD, Kind.OUTPUT):
        return torch.cat(rows)
    return None


def _same(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two ranks hold the same but for rounding."""
    if value.shape != other.shape:
        return False
    return bool((difference(value, other) <= 1e-5 * largest(other)).all())


# ----------------------------------------------------------------------------
# Micro-batches: a call on a rank has other rows than the same call on one device.
#
# Two micro-batches of eight rows are rows 0-3 and 4-7 on one device, but rows 0 and 1 on
# the first of four ranks. Over all calls of a step together, the rows are the same.


def num_model_calls(pieces: Mapping[Key, Piece]) -> int:
    """How often the model itself was called."""
    calls = [key.call for key in pieces if key.kind is Kind.FORWARD and not key.name]
    return max(calls, default=0) + 1


def merge_calls(pieces: Mapping[Key, Piece]) -> dict[Key, Piece]:
    """The calls of a step as one, by rows; a module called twice in a call stays two."""
    model_calls = num_model_calls(pieces)
    calls = Counter(
        (key.kind, key.name, key.leaf) for key in pieces if key.kind in _INSIDE
    )
    found: dict[Key, list[tuple[int, Piece]]] = {}
    for key, piece in pieces.items():
        each = calls[key.kind, key.name, key.leaf] // model_calls
        if key.kind in _INSIDE and each and _has_rows(piece):
            group = key._replace(call=key.call % each)
            found.setdefault(group, []).append((key.call, piece))
        else:
            found[key] = [(0, piece)]
    return {key: _joined(parts) for key, parts in found.items()}


def _has_rows(piece: Piece) -> bool:
    is_cut = any(text.startswith(("S(0", "_S(0")) for text in piece.layout or ())
    return bool(piece.shape) and not piece.is_sketch and not is_cut


def _joined(parts: list[tuple[int, Piece]]) -> Piece:
    """The rows in the order of the calls; backward visits them the other way round."""
    if len(parts) == 1:
        return parts[0][1]
    pieces = [piece for _, piece in sorted(parts, key=lambda part: part[0])]
    rows = sum(piece.shape[0] for piece in pieces)
    return replace(
        pieces[0],
        value=torch.cat([piece.value for piece in pieces]),
        shape=(rows, *pieces[0].shape[1:]),
    )


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
        return match_by_shard(match, allowed, header.grid, pieces) if pieces else match

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
    if key.kind in _BACKWARD:
        return "gradient of an activation"
    if key.kind is Kind.STATE:
        return f"state {key.name.rpartition('.')[2]}"
    return ""
