"""A recording: what one run computed, step by step, in a folder.

Each rank writes ``rank<r>-step<s>.pt`` after each step and ``rank<r>.json`` when it is
done; a rank without the latter did not finish. Files are written whole or not at all. The
initial values are step -1.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchspmd.comm.storage import write_whole
from torchspmd.errors import RecordingError
from torchspmd.verify.recording.layouts import Grid, grid_from_dict

FORMAT = "torchspmd.parity"
VERSION = 1
INITIAL = -1  # the step number of the values before the first step


class Kind(StrEnum):
    """What a recorded value is."""

    INPUT = "input"
    FORWARD = "activation"
    LOSS = "loss"
    OUTPUT = "output of the step"
    GRAD_OUTPUT = "gradient of the output"
    GRAD_INPUT = "gradient of the input"
    GRADIENT = "gradient of a parameter"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    STATE = "optimizer state"


_KINDS = {kind.value: kind for kind in Kind}  # quicker than the enum's own lookup


class Key(NamedTuple):
    """Which value: of which kind, of what, in which call, which leaf of a tree."""

    kind: Kind
    name: str
    call: int = 0
    leaf: int = 0


def module_of(name: str) -> str:
    """The module that owns a parameter, a buffer or a state.

    >>> module_of("layers.0.up.weight")
    'layers.0.up'
    """
    return name.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one rank holds of a value.

    ``value`` is the local tensor or, where ``is_sketch``, a sketch of it. ``grid`` and
    ``layout`` are those of a DTensor; None for a plain tensor.
    """

    value: torch.Tensor
    shape: tuple[int, ...]
    dtype: str
    grid: Grid | None = None
    layout: tuple[str, ...] | None = None
    is_sketch: bool = False


@dataclass(frozen=True, slots=True)
class Header:
    """What one rank says about its run."""

    rank: int
    world_size: int
    num_steps: int
    grid: Grid
    data_axes: tuple[str, ...]
    loss_reduction: str = "mean"
    # Names of one parameter, by its first name; frozen ones; wrappers such as DDP.
    ties: tuple[tuple[str, ...], ...] = ()
    frozen: tuple[str, ...] = ()
    wrappers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    sees_modules: bool = True
    sees_gradients: bool = True
    depth: int = 1


@dataclass(frozen=True, slots=True)
class Recording:
    """All ranks of one run; values are read step by step."""

    folder: Path
    headers: tuple[Header, ...]

    @property
    def first(self) -> Header:
        """What all ranks have in common is read from the first."""
        return self.headers[0]

    def read_step(self, step: int) -> list[dict[Key, Piece]]:
        """What each rank recorded in a step, in the order in which it happened."""
        return [
            _read_pieces(self.folder / _step_file(header.rank, step))
            for header in self.headers
        ]


def write_step(folder: Path, rank: int, step: int, pieces: Mapping[Key, Piece]) -> None:
    """Write what a rank recorded in one step: a table, and one long tensor a dtype.

    Many small tensors take many times as long to read.
    """
    flat: dict[str, list[torch.Tensor]] = {}
    starts: Counter[str] = Counter()
    rows = []
    for key, piece in pieces.items():
        stored = str(piece.value.dtype).removeprefix("torch.")
        rows.append(_row(key, piece, stored, starts[stored]))
        flat.setdefault(stored, []).append(piece.value.flatten())
        starts[stored] += piece.value.numel()
    values = {dtype: torch.cat(parts) for dtype, parts in flat.items()}
    path = folder / _step_file(rank, step)
    part = path.with_suffix(".part")
    torch.save({"table": json.dumps(rows), "values": values}, part)
    part.replace(path)


def _row(key: Key, piece: Piece, stored: str, start: int) -> dict[str, Any]:
    return {
        "key": [key.kind.value, key.name, key.call, key.leaf],
        "stored": stored,
        "start": start,
        "size": list(piece.value.shape),
        "shape": list(piece.shape),
        "dtype": piece.dtype,
        "grid": None if piece.grid is None else asdict(piece.grid),
        "layout": piece.layout,
        "is_sketch": piece.is_sketch,
    }


def write_header(folder: Path, header: Header) -> None:
    """Say that a rank is done, and what it did."""
    about = {"format": FORMAT, "version": VERSION, "torch": torch.__version__}
    data = {**about, **asdict(header)}
    write_whole(folder / f"rank{header.rank}.json", json.dumps(data, indent=1) + "\n")


def prepare_folder(folder: str | os.PathLike[str], rank: int) -> Path:
    """Make the folder; refuse one that holds this rank's part of another recording."""
    path = Path(folder)
    if (path / f"rank{rank}.json").exists():
        raise RecordingError(
            f"record: {path} holds a recording already. Give a new folder, or delete it."
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordingError(f"record: cannot make {path}: {error.strerror}.") from None
    return path


def load_recording(folder: str | os.PathLike[str]) -> Recording:
    """Open a recording that ``record`` or ``RunOptions(save=...)`` made.

    Raises:
        RecordingError: It is not a recording, has another version, or a rank is missing.
    """
    path = Path(folder)
    first = path / "rank0.json"
    if not path.is_dir() or not any(path.glob("rank*")):
        raise RecordingError(
            f"{path} holds no recording. Give a folder that `record` or "
            "`RunOptions(save=...)` wrote."
        )
    world_size = _read_header(first).world_size if first.exists() else 1
    missing = [
        str(rank)
        for rank in range(world_size)
        if not (path / f"rank{rank}.json").exists()
    ]
    if missing:
        raise RecordingError(
            f"{path} is not whole: rank {', '.join(missing)} of {world_size} did not "
            "finish its recording. Did the run fail? Record it again."
        )
    headers = tuple(
        _read_header(path / f"rank{rank}.json") for rank in range(world_size)
    )
    _check_agreement(path, headers)
    return Recording(path, headers)


def are_equal(one: Path, other: Path) -> bool:
    """Whether two recordings of one rank hold the same values, bit for bit."""
    for path in sorted(one.glob("rank0-*.pt")):
        left, right = (
            torch.load(folder / path.name, weights_only=True) for folder in (one, other)
        )
        if left["table"] != right["table"]:
            return False
        pairs = zip(left["values"].values(), right["values"].values(), strict=True)
        if not all(torch.equal(*pair) for pair in pairs):
            return False
    return True


def _check_agreement(path: Path, headers: tuple[Header, ...]) -> None:
    first = headers[0]
    for header in headers[1:]:
        if (header.world_size, header.num_steps) != (first.world_size, first.num_steps):
            raise RecordingError(
                f"{path}: rank {header.rank} recorded {header.num_steps} steps of "
                f"{header.world_size} ranks, rank 0 {first.num_steps} of "
                f"{first.world_size}. Record all ranks of one run into one new folder."
            )


def _read_header(path: Path) -> Header:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordingError(f"{path} cannot be read: {error}.") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise RecordingError(f"{path} is not part of a recording of torchspmd.")
    if data.get("version") != VERSION:
        raise RecordingError(
            f"{path} has recording version {data.get('version')!r}; this torchspmd reads "
            f"version {VERSION}. Record again with this version."
        )
    try:
        known = {name: data[name] for name in Header.__dataclass_fields__}
        known["grid"] = grid_from_dict(data["grid"])
        known["ties"] = tuple(tuple(names) for names in data["ties"])
        lists = ("data_axes", "frozen", "wrappers", "notes")
        return Header(**{**known, **{name: tuple(known[name]) for name in lists}})
    except (LookupError, TypeError) as error:
        raise RecordingError(f"{path} has a broken entry ({error}).") from None


def _read_pieces(path: Path) -> dict[Key, Piece]:
    try:
        data: dict[str, Any] = torch.load(path, weights_only=True)
        rows, values = json.loads(data["table"]), data["values"]
        pieces = {}
        for row in rows:
            kind, *rest = row["key"]
            pieces[Key(_KINDS[kind], *rest)] = _piece(row, values)
        return pieces
    except Exception as error:
        raise RecordingError(
            f"{path} cannot be read ({type(error).__name__}). Record again."
        ) from None


def _piece(row: dict[str, Any], values: Mapping[str, torch.Tensor]) -> Piece:
    count, start = math.prod(row["size"]), row["start"]
    value = values[row["stored"]][start : start + count].view(row["size"])
    return Piece(
        value=value,
        shape=tuple(row["shape"]),
        dtype=row["dtype"],
        grid=None if row["grid"] is None else grid_from_dict(row["grid"]),
        layout=None if row["layout"] is None else tuple(row["layout"]),
        is_sketch=row["is_sketch"],
    )


def _step_file(rank: int, step: int) -> str:
    return f"rank{rank}-initial.pt" if step == INITIAL else f"rank{rank}-step{step}.pt"
