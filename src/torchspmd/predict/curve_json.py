"""The curve of a memory account, as the prediction file has it."""

from collections import Counter
from typing import Any

from torchspmd.predict.memory import MemoryAccount
from torchspmd.rehearse.recording import Mark, MarkKind

__all__ = ["curve_json"]

_POINTS = 1000
_HIGHEST = 5  # points whose holders are listed
_MARKS = {
    MarkKind.INIT_END: "end of initialisation",
    MarkKind.STEP_BEGIN: "step {} begins",
    MarkKind.STEP_END: "step {} ends",
}


def curve_json(account: MemoryAccount, most: int = _POINTS) -> dict[str, Any]:
    """Points of the curve in columns: the highest row of each stretch of it.

    Args:
        account: Of ``count_memory``.
        most: Points.
    """
    rows = _rows(account, most)
    curve = account.curve
    categories = _categories(account, rows)
    highest = sorted(rows, key=curve.allocated.__getitem__, reverse=True)[:_HIGHEST]
    return {
        "event": [curve.events[row] for row in rows],
        "seconds": None,
        "allocated": [curve.allocated[row] for row in rows],
        "reserved": [curve.reserved[row] for row in rows],
        "categories": categories,
        "holders": [
            {
                "point": rows.index(row),
                "holders": [holder._asdict() for holder in account.holders(row, 10)],
            }
            for row in sorted(highest)
        ],
        "marks": _marks(account, rows),
    }


def _rows(account: MemoryAccount, most: int) -> list[int]:
    allocated = account.curve.allocated
    length = len(allocated)
    width = max(1, -(-length // most))
    rows = {
        max(range(start, min(start + width, length)), key=allocated.__getitem__)
        for start in range(0, length, width)
    }
    if account.peak.row >= 0:
        rows.add(account.peak.row)
    return sorted(rows)


def _categories(account: MemoryAccount, rows: list[int]) -> dict[str, list[int]]:
    """Bytes of each category at each point, in one pass."""
    curve = account.curve
    now: Counter[str] = Counter()
    points: list[Counter[str]] = []
    wanted = iter(rows)
    following = next(wanted, None)
    for row, (storage, change) in enumerate(
        zip(curve.storages, curve.changes, strict=True)
    ):
        now[account.category(storage)] += change
        if row == following:
            points.append(Counter(now))
            following = next(wanted, None)
    return {name: [point[name] for point in points] for name in now if any(now) or name}


def _marks(account: MemoryAccount, rows: list[int]) -> list[dict[str, Any]]:
    events = [account.curve.events[row] for row in rows]
    marks = []
    point = 0
    for place, event in enumerate(account.recording.events):
        if isinstance(event, Mark) and event.kind in _MARKS:
            while point < len(events) - 1 and events[point] < place:
                point += 1
            marks.append(
                {"point": point, "name": _MARKS[event.kind].format(event.value)}
            )
    return marks
