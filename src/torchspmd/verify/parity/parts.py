"""Parameters that the parallel run keeps in parts, such as a fused projection.

No placement describes a fused weight of which each rank holds a piece of every part, so
parallel layers keep the parts as parameters of their own. Which parts make which
parameter is read from the initial values.
"""

from collections.abc import Mapping, Sequence

import torch

from torchspmd.verify.parity.match import whole_values
from torchspmd.verify.recording.files import Key, Kind, Piece
from torchspmd.verify.recording.names import module_of

Parts = dict[str, tuple[str, ...]]  # a parameter of one device: those of the ranks


def find_parts(
    reference: Mapping[Key, torch.Tensor], ranks: Sequence[Mapping[Key, Piece]]
) -> Parts:
    """For each parameter that the ranks do not have: the parts, in order of its rows."""
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
        names = _rows_of(reference[key], _near(key.name, extra))
        if names:
            found[key.name] = names
    return found


def _near(name: str, extra: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parts belong to the module of the parameter, or to one inside it."""
    module = module_of(name)
    return {n: v for n, v in extra.items() if module_of(n).startswith(module)}


def _rows_of(
    whole: torch.Tensor, parts: dict[str, torch.Tensor]
) -> tuple[str, ...] | None:
    names: list[str] = []
    start = 0
    while whole.ndim and start < whole.shape[0]:
        for name, part in parts.items():
            rows = whole[start : start + len(part)] if part.ndim else whole[:0]
            if name not in names and len(part) and torch.equal(rows, part):
                names.append(name)
                start += len(part)
                break
        else:
            return None
    return tuple(names) or None


def join_parts(
    key: Key, parts: Parts, ranks: Sequence[Mapping[Key, Piece]]
) -> tuple[torch.Tensor, ...] | None:
    """What each rank says a value is that it keeps in parts; None where it does not."""
    name, rest = key.name, ""
    if key.kind is Kind.STATE:
        name, _, rest = key.name.rpartition(".")
    if name not in parts:
        return None
    columns = []
    for part in parts[name]:
        wanted = key._replace(name=f"{part}.{rest}" if rest else part)
        if any(wanted not in rank for rank in ranks):
            return None
        values = whole_values([rank[wanted] for rank in ranks])
        if values is None:
            return None
        columns.append(values)
    if not columns[0][0].ndim:  # a counter: each part has its own
        return columns[0]
    return tuple(torch.cat(rows) for rows in zip(*columns, strict=True))
