"""The whole value of a reference, which may itself be a run on several ranks."""

import torch

from torchspmd.verify.parity.match import difference, largest, whole_values
from torchspmd.verify.recording.files import Header, Key, Kind, Piece


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
    if key.kind in (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT):
        return None  # their scale is not known
    if key.kind in (Kind.INPUT, Kind.FORWARD, Kind.OUTPUT):
        return torch.cat(rows)
    return None


def _same(value: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two ranks hold the same but for rounding."""
    if value.shape != other.shape:
        return False
    return bool((difference(value, other) <= 1e-5 * largest(other)).all())
