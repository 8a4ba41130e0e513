"""What a step communicates and holds in memory, as a value that is kept in a file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from torchspmd.comm import Ledger
from torchspmd.errors import LockError


class Row(NamedTuple):
    """What makes two communications the same one, before and after a change."""

    phase: str
    module: str
    kind: str
    axis: str
    dtype: str
    implicit: bool = False
    cause: str | None = None


@dataclass(frozen=True, slots=True)
class Amount:
    """How often, and how many payload bytes together."""

    count: int = 0
    payload_bytes: int = 0

    def __add__(self, other: "Amount") -> "Amount":
        return Amount(
            self.count + other.count, self.payload_bytes + other.payload_bytes
        )


NOTHING = Amount()


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank: what training holds, and the most that waits for backward."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    activations: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the lock was made, and how to make it again.

    Attributes:
        script: Path of the script, relative to the lock's folder, with slashes.
        mesh: Axes and sizes, as in ``dp=2,tp=4``; their product is the world size.
        rank: The rank that was played.
        steps: How many optimizer steps were recorded; 0 for all.
        skip: How many were let pass before.
        arguments: What the script was given.
    """

    script: str
    mesh: str
    rank: int = 0
    steps: int = 1
    skip: int = 0
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lock:
    """The communication of one step, by row.

    Attributes:
        made_by: The script and how it was run, or the name of a test.
        rows: Everything that was sent, by row.
        memory: What one rank holds; None where it was not watched.
        setup: What was sent before the first module was called; None: not recorded.
        notes: What a reader of the ledger must know.
        torch: The version it was made with.
        sources: Lines of the program behind the rows; not part of the file.
    """

    made_by: Recipe | str
    rows: Mapping[Row, Amount]
    memory: Memory | None = None
    setup: Amount | None = None
    notes: tuple[str, ...] = ()
    torch: str = str(torch.__version__).partition("+")[0]
    sources: Mapping[Row, str] = field(default_factory=dict, compare=False)

    def total(self) -> Amount:
        """Everything together."""
        return sum(self.rows.values(), NOTHING)


def lock_ledger(
    ledger: Ledger,
    made_by: Recipe | str,
    *,
    memory: Memory | None = None,
    setup: Ledger | None = None,
) -> Lock:
    """Lock what was recorded; communication of run-time checks is left out.

    >>> lock_ledger(Ledger(), "a test").total()
    Amount(count=0, payload_bytes=0)

    Raises:
        LockError: Single events were dropped, and with them the reasons.
    """
    if ledger.dropped:
        raise LockError(
            f"{ledger.dropped} of {len(ledger)} communications were dropped from the "
            "ledger, and a lock needs all: record fewer steps."
        )
    rows: dict[Row, Amount] = {}
    sources: dict[Row, str] = {}
    for event in ledger.events:
        if event.check:
            continue
        row = Row(
            event.phase.value,
            event.module,
            event.kind.value,
            event.axis,
            event.dtype,
            event.implicit,
            event.cause,
        )
        rows[row] = rows.get(row, NOTHING) + Amount(1, event.payload_bytes)
        if event.source is not None:
            sources.setdefault(row, event.source)
    before = None if setup is None else _amount(setup)
    return Lock(
        made_by, rows, memory, before, tuple(sorted(ledger.notes)), sources=sources
    )


def _amount(ledger: Ledger) -> Amount:
    total = ledger.total(check=False)
    return Amount(total.count, total.payload_bytes)
