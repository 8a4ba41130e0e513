"""Values of a step put together: parameters in parts, references of several ranks, calls.

A parallel run may keep a parameter in parts, and call a model in micro-batches. A reference
may itself be a run on several ranks.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from torchspmd.verify.parity.match import difference, largest, whole_values
from torchspmd.verify.parity.origin import BACKWARD, INSIDE
from torchspmd.verify.recording.files import Header, Key, Kind, Piece, module_of

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
    if key.kind in BACKWARD:
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
        (key.kind, key.name, key.leaf) for key in pieces if key.kind in INSIDE
    )
    found: dict[Key, list[tuple[int, Piece]]] = {}
    for key, piece in pieces.items():
        each = calls[key.kind, key.name, key.leaf] // model_calls
        if key.kind in INSIDE and each and _has_rows(piece):
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
