"""What the views are made of."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Document = Mapping[str, Any]
View = dict[str, Any]
Page = dict[str, Any]

PREDICT = "torchspmd predict train.py --world-size 8 --html page.html"


def missing(why: str, command: str | None = None) -> View:
    """A view without data: one sentence on why, and the command that gives it."""
    return {"missing": why, "command": command}


def one_result(
    command: str = "torchspmd show before.json after.json --out page.html",
) -> View:
    """The comparison, where there is nothing to compare with."""
    return missing("This is one result; a second one shows what changed.", command)


def notes_view(document: Document, without: str) -> View:
    """The notes of a result that rests on nothing else."""
    notes = list(document.get("notes") or [])
    return {"rows": [], "lists": [["Notes", notes]]} if notes else missing(without)


def figure(
    label: str, value: object, unit: str = "n", note: str | None = None
) -> dict[str, Any]:
    """One number of the verdict."""
    return {"label": label, "value": value, "unit": unit, "note": note}


def column(key: str, label: str, unit: str = "text", *, bar: bool = False) -> View:
    """A column of a table."""
    return {"key": key, "label": label, "unit": unit, "bar": bar}


def plural(count: int, word: str) -> str:
    """A number with its word.

    >>> plural(1, "rank"), plural(8, "rank")
    ('1 rank', '8 ranks')
    """
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def around(path: str) -> Iterator[str]:
    """A module and all that it is inside of.

    >>> list(around("GPT.layers.0"))
    ['GPT', 'GPT.layers', 'GPT.layers.0']
    """
    words = path.split(".")
    for end in range(1, len(words) + 1):
        yield ".".join(words[:end])


def used(values: Iterable[object]) -> bool:
    """Whether any figure of a column says something."""
    return any(values)
