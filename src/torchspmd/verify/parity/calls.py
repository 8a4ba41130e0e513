"""Micro-batches: rows meet in other calls on ranks than on one device.

Two micro-batches of eight rows are rows 0-3 and 4-7 on one device, but rows 0 and 1 on
the first of four ranks. Over all calls of a step together, the rows are the same.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from torchspmd.verify.recording.files import Key, Kind, Piece

_MERGED = (Kind.INPUT, Kind.FORWARD, Kind.GRAD_OUTPUT, Kind.GRAD_INPUT)


def num_model_calls(pieces: Mapping[Key, Piece]) -> int:
    """How often the model itself was called."""
    calls = [key.call for key in pieces if key.kind is Kind.FORWARD and not key.name]
    return max(calls, default=0) + 1


def merge_calls(pieces: Mapping[Key, Piece]) -> dict[Key, Piece]:
    """The calls of a step as one, by rows; a module called twice in a call stays two."""
    model_calls = num_model_calls(pieces)
    calls = Counter(
        (key.kind, key.name, key.leaf) for key in pieces if key.kind in _MERGED
    )
    found: dict[Key, list[tuple[int, Piece]]] = {}
    for key, piece in pieces.items():
        each = calls[key.kind, key.name, key.leaf] // model_calls
        if key.kind in _MERGED and each and _has_rows(piece):
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
