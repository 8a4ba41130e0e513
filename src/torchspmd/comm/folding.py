"""Paths of modules that differ in a number only, written as one: ``layers.[0-3].mlp``."""

import re
from collections.abc import Hashable, Iterable
from itertools import product
from typing import TypeVar

Content = TypeVar("Content", bound=Hashable)

_FOLDED = re.compile(r"\[\d+(-\d+)?(,\d+(-\d+)?)*\]")


def fold(rows: Iterable[tuple[str, Content]]) -> list[tuple[str, Content]]:
    """Join modules that differ in one number only and have the same content.

    >>> fold([("A.0.b", "x"), ("A.1.b", "x"), ("A.2.b", "y")])
    [('A.[0-1].b', 'x'), ('A.2.b', 'y')]
    """
    rows = list(rows)
    depth = max((path.count(".") for path, _ in rows), default=-1) + 1
    # The first part is the root module's class, which is never one of several.
    for place in reversed(range(1, depth)):
        rows = _fold_at(rows, place)
    return rows


def _fold_at(rows: list[tuple[str, Content]], place: int) -> list[tuple[str, Content]]:
    alike: dict[tuple[object, ...], tuple[list[str], Content, list[int]]] = {}
    for path, content in rows:
        parts = path.split(".")
        name = parts[place] if place < len(parts) else ""
        key = (
            "#" if name.isdecimal() else name,
            *parts[:place],
            "",
            *parts[place + 1 :],
        )
        _, _, numbers = alike.setdefault((key, content), (parts, content, []))
        if name.isdecimal():
            numbers.append(int(name))
    for parts, _, numbers in alike.values():
        if len(numbers) > 1:
            parts[place] = f"[{ranges(numbers)}]"
    return [(".".join(parts), content) for parts, content, _ in alike.values()]


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as text.

    >>> ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7-8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def unfold(path: str) -> list[str]:
    """The modules that a folded path stands for.

    >>> unfold("GPT.layers.[0-1,3].mlp")
    ['GPT.layers.0.mlp', 'GPT.layers.1.mlp', 'GPT.layers.3.mlp']
    """
    return [".".join(parts) for parts in product(*map(_unfold_part, path.split(".")))]


def _unfold_part(part: str) -> list[str]:
    if not _FOLDED.fullmatch(part):
        return [part]
    numbers: list[str] = []
    for run in part[1:-1].split(","):
        first, _, last = run.partition("-")
        numbers += map(str, range(int(first), int(last or first) + 1))
    return numbers
