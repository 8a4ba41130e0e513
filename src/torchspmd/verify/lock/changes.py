"""What changed between two locks: a sentence for each change."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchspmd.comm import Phase, Total, format_bytes
from torchspmd.comm.folding import fold
from torchspmd.verify.contract.claim import natural
from torchspmd.verify.contract.text import describe, reason
from torchspmd.verify.lock.lockfile import NOTHING, Lock, Memory, Row

_PHASES = tuple(phase.value for phase in Phase)


class _Change(NamedTuple):
    """What there is more or less of than before, and why; in sentences, all of it."""

    row: Row
    was: Total
    now: Total
    why: str


def changes(locked: Lock, now: Lock) -> list[str]:
    """A sentence for each difference; empty when the step is as it was locked.

    >>> row = Row("forward", "GPT.head", "all_gather", "tp", "float32")
    >>> changes(Lock("test", {}), Lock("test", {row: Total(1, 2**20)}))
    ['+1 all_gather of float32 over tp, 1.00 MiB, forward of GPT.head']
    """
    return [
        *(_sentence(change) for change in _row_changes(locked, now)),
        *_setup_change(locked.setup, now.setup),
        *_memory_changes(locked.memory, now.memory),
        *(f"+ note: {text}" for text in now.notes if text not in locked.notes),
        *(f"- note: {text}" for text in locked.notes if text not in now.notes),
    ]


def _row_changes(locked: Lock, now: Lock) -> list[_Change]:
    """Every change, alike modules joined, in the order of the lock."""
    by_place: dict[Row, list[Row]] = {}
    for row in {**locked.rows, **now.rows}:
        if locked.rows.get(row) != now.rows.get(row):
            by_place.setdefault(row._replace(cause=None), []).append(row)
    found = [
        (place.module, change._replace(row=change.row._replace(module="")))
        for place, rows in by_place.items()
        for change in _changes_at(place, rows, locked, now)
    ]
    joined = fold(sorted(found, key=_order))
    return [
        change._replace(row=change.row._replace(module=name))
        for name, change in sorted(joined, key=_order)
    ]


def _changes_at(
    place: Row, rows: list[Row], locked: Lock, now: Lock
) -> Iterator[_Change]:
    """Rows that differ in their causes only: if they even out, the cause changed."""
    was = _total(locked.rows.get(row, NOTHING) for row in rows)
    is_now = _total(now.rows.get(row, NOTHING) for row in rows)
    if was == is_now:
        before = _reasons(rows, locked) or "another reason"
        yield _Change(place, was, is_now, f"{_reasons(rows, now)}; before, {before}")
        return
    for row in rows:
        why = reason(row.cause, now.sources.get(row), row.implicit)
        was, is_now = locked.rows.get(row, NOTHING), now.rows.get(row, NOTHING)
        yield _Change(place, was, is_now, why)


def _total(amounts: Iterable[Total]) -> Total:
    return sum(amounts, NOTHING)


def _reasons(rows: list[Row], lock: Lock) -> str:
    known = [
        reason(row.cause, lock.sources.get(row), row.implicit)
        for row in rows
        if row in lock.rows
    ]
    return ", ".join(filter(None, known))


def _order(item: tuple[str, _Change]) -> tuple[object, ...]:
    module, (row, _, _, why) = item
    return (_PHASES.index(row.phase), natural(module), *map(str, row[2:]), why)


def _sentence(change: _Change) -> str:
    row, was, now, why = change
    more, larger = now.count - was.count, now.payload_bytes - was.payload_bytes
    evens_out = more * larger < 0 or not (more and larger)
    size = now.payload_bytes if evens_out else abs(larger)
    what = describe(row.kind, row.axis, size, row.phase, row.module, row.dtype)
    if evens_out and larger:
        what += f", instead of {format_bytes(was.payload_bytes)}"
    times = f"{more:+d}" if more else f"= {now.count}"
    return f"{times} {what}" + (f": {why}" if why else "")


def _setup_change(was: Total | None, now: Total | None) -> list[str]:
    if was is None or now is None or was == now:
        return []
    return [
        f"{now.count - was.count:+d} communications before the first module call: "
        f"{now.count}, {format_bytes(now.payload_bytes)}, instead of {was.count}, "
        f"{format_bytes(was.payload_bytes)}"
    ]


def _memory_changes(was: Memory | None, now: Memory | None) -> list[str]:
    if was is None or now is None:
        return []
    lines = []
    for name in Memory.__dataclass_fields__:
        before, after = getattr(was, name), getattr(now, name)
        if before != after:
            lines.append(
                f"{after - before:+d} bytes of {name} on a rank: {format_bytes(after)} "
                f"instead of {format_bytes(before)}"
            )
    return lines
