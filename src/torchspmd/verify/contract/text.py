"""One communication as words: the same in contracts, locks and their differences."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from torchspmd.comm import CommEvent, Key, Ledger, Total, format_bytes
from torchspmd.comm.folding import fold, unfold
from torchspmd.comm.ledger import key_of

_MAX_LINES = 12
_MAX_REASONS = 2


def describe(
    kind: str, axis: str, size: int, phase: str, module: str, dtype: str | None = None
) -> str:
    """What was sent, and for whom; the size is that of one of the modules.

    >>> describe("all_gather", "tp", 2**26, "backward", "GPT.layers.[0-3].mlp")
    'all_gather over tp, 64.0 MiB, backward of GPT.layers.[0-3].mlp (each of 4)'
    """
    of = "" if dtype is None else f" of {dtype}"
    times = len(unfold(module))
    each = f" (each of {times})" if times > 1 else ""
    return f"{kind}{of} over {axis}, {format_bytes(size)}, {phase} of {module}{each}"


def reason(cause: str | None, source: str | None, implicit: bool) -> str:
    """Why it was sent, as far as it is known; empty when it is not.

    >>> reason("aten.mm.default: Shard(0) -> Replicate", None, implicit=True)
    'DTensor redistributed an operand of aten.mm.default from Shard(0) to Replicate'
    >>> reason("Shard(1) -> Replicate", "train.py:40 forward", implicit=False)
    'redistribution from Shard(1) to Replicate at train.py:40 in forward'
    """
    words = []
    if cause is not None:
        operator, _, change = cause.rpartition(": ")
        before, _, after = change.partition(" -> ")
        what = "redistribution"
        if implicit:
            what = f"DTensor redistributed an operand of {operator or 'an operator'}"
        words.append(f"{what} from {before} to {after}")
    elif implicit:
        words.append("DTensor redistributed an operand by itself")
    if source is not None:
        words.append(f"at {_place(source)}")
    return " ".join(words)


def _place(source: str) -> str:
    """``file:line function`` as words, the file relative to where we are."""
    file, _, function = source.rpartition(" ")
    path, here = Path(file), Path.cwd()
    if path.is_absolute() and path.is_relative_to(here):
        file = str(path.relative_to(here))
    return f"{file} in {function}" if file else source


def origin_lines(ledger: Ledger, rows: Iterable[tuple[Key, Total]]) -> list[str]:
    """The modules and lines behind some rows; alike modules together, single ones first."""
    reasons = _reasons(ledger.events)
    contents = [
        (
            key.module,
            (
                str(key.kind),
                key.axis,
                total.count,
                total.payload_bytes,
                str(key.phase),
                key.implicit,
                tuple(reasons.get(key, ())),
            ),
        )
        for key, total in rows
        if total.count
    ]
    folded = sorted(fold(contents), key=lambda row: len(unfold(row[0])))
    lines = []
    for module, (kind, axis, count, size, phase, implicit, why) in folded:
        text = f"    {count} {describe(kind, axis, size, phase, module)}"
        lines.append(text + _because(why, implicit))
    return _shortened(lines)


def _because(why: Sequence[str], implicit: bool) -> str:
    known = why or ((reason(None, None, implicit),) if implicit else ())
    if not known:
        return ""
    more = f", and {len(known) - _MAX_REASONS} more" * (len(known) > _MAX_REASONS)
    return f": {'; '.join(known[:_MAX_REASONS])}{more}"


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_LINES:
        return lines
    return [*lines[:_MAX_LINES], f"    and {len(lines) - _MAX_LINES} rows more"]


def _reasons(events: Iterable[CommEvent]) -> dict[Key, dict[str, None]]:
    """For each row, the different reasons of its single events, in order."""
    reasons: dict[Key, dict[str, None]] = {}
    for event in events:
        text = reason(event.cause, event.source, event.implicit)
        if text:
            reasons.setdefault(key_of(event), {})[text] = None
    return reasons


def near_misses(
    rows: Iterable[tuple[Key, Total]], almost: Callable[[Key], bool]
) -> str | None:
    """What was not counted although the kind fits, by axis and phase; None for nothing."""
    sums: dict[str, int] = {}
    for key, total in rows:
        if almost(key):
            place = f"{key.kind} over {key.axis} in {key.phase}"
            sums[place] = sums.get(place, 0) + total.count
    if not sums:
        return None
    return ", ".join(f"{count} {place}" for place, count in sums.items())


def note_lines(ledger: Ledger) -> list[str]:
    """What a reader of the numbers must know."""
    lines = ledger.note_lines()
    if ledger.events and not any(event.source for event in ledger.events):
        lines.append("For the lines of the program, record with sources=True.")
    return lines
