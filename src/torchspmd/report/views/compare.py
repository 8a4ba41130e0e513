"""Two results side by side: figures, communication by kind, and by module."""

import shlex
from collections import defaultdict
from typing import Any

from torchspmd.report.results import ledger_of
from torchspmd.report.views.parts import Document, Page, View, figure, missing, plural
from torchspmd.report.views.paths import (
    Numbers,
    united,
    with_numbers,
    without_numbers,
)

_MORE_IS_BETTER = frozenset({"MFU", "margin", "that fit"})
_OPEN = "A comparison has one for each result: choose one of the two above."

Row = dict[str, Any]


def comparison_page(document: Document, pages: list[Page], names: list[str]) -> Page:
    """The page of two results, which are pages inside of it."""
    for page, name in zip(pages, names, strict=True):
        page["name"] = name
        page.pop("pages", None)
    figures = _figures(pages)
    kinds = _kinds(document)
    modules = _modules(pages)
    return {
        "kind": "comparison",
        "title": f"{names[0]} → {names[1]}",
        "subtitle": f"comparison of two results: {pages[0]['kind']} and {pages[1]['kind']}"
        if pages[0]["kind"] != pages[1]["kind"]
        else f"comparison of two results: {pages[0]['kind']}",
        "whole": "the comparison",
        "opens": "compare",
        "pages": pages,
        "views": {
            "verdict": {
                **_verdict(figures, kinds, modules),
                "command": shlex.join(["torchspmd", "show", *names]),
            },
            **{
                view: missing(_OPEN)
                for view in ("timeline", "memory", "modules", "mesh", "assumptions")
            },
            "compare": {
                "names": names,
                "figures": figures,
                "kinds": kinds,
                "modules": modules,
            },
        },
    }


def _verdict(figures: list[Row], kinds: list[Row] | None, modules: list[Row]) -> View:
    differing = [row for row in figures if row["before"] != row["after"]]
    count = len(differing) + len(kinds or []) + len(modules)
    return {
        "answer": {
            "text": "They differ" if count else "No difference",
            "tone": "warn" if count else "good",
            "detail": f"{plural(len(differing), 'figure')}, "
            f"{plural(len({row['module'] for row in modules}), 'module')} differ",
        },
        "figures": [
            figure(row["label"], row["after"], row["unit"], _was(row))
            for row in figures
        ],
        "notes": [],
    }


def _was(row: Row) -> str:
    before, after = row["before"], row["after"]
    if before == after:
        return "as before"
    if isinstance(before, int | float) and isinstance(after, int | float) and before:
        return f"{100 * (after - before) / abs(before):+.1f} %"
    return "changed"


def _figures(pages: list[Page]) -> list[Row]:
    """The figures of both verdicts, and what is held at the peak."""
    before, after = (_by_label(page) for page in pages)
    rows = []
    for label in [*before, *(label for label in after if label not in before)]:
        one, other = before.get(label), after.get(label)
        unit = (one or other or {}).get("unit")
        rows.append(
            {
                "label": label,
                "unit": unit,
                "before": one and one["value"],
                "after": other and other["value"],
                "more_is_better": label in _MORE_IS_BETTER,
            }
        )
    return rows


def _by_label(page: Page) -> dict[str, Row]:
    figures = {each["label"]: each for each in page["views"]["verdict"]["figures"]}
    memory = page["views"]["memory"]
    for name, value in (memory.get("by_category") or {}).items():
        label = f"{name} at the peak"
        figures[label] = figure(label, value, "B")
    if memory.get("margin_bytes") is not None:
        figures["margin"] = figure("margin", memory["margin_bytes"], "B")
    return figures


def _kinds(document: Document) -> list[Row] | None:
    """Kinds of communication that differ, where both have a ledger."""
    ledgers = [ledger_of(document["before"]), ledger_of(document["after"])]
    if None in ledgers:
        return None
    sums: defaultdict[tuple[str, ...], list[list[int]]]
    sums = defaultdict(lambda: [[0, 0], [0, 0]])
    for place, ledger in enumerate(ledgers):
        assert ledger is not None
        for row in ledger["totals"]:
            entry = sums[row["kind"], row["axis"], row["phase"]][place]
            entry[0] += row["count"]
            entry[1] += row["payload_bytes"]
    rows = []
    for (kind, axis, phase), (before, after) in sums.items():
        for place, (label, unit) in enumerate((("count", "n"), ("payload", "B"))):
            if before[place] != after[place]:
                rows.append(
                    {
                        "kind": kind,
                        "axis": axis,
                        "phase": phase,
                        "label": label,
                        "unit": unit,
                        "before": before[place],
                        "after": after[place],
                    }
                )
    return rows


def _modules(pages: list[Page]) -> list[Row]:
    """Modules whose figures differ; those of numbered layers added up."""
    both = [_module_values(page) for page in pages]
    labels = list(dict.fromkeys(key for values in both for key in values))
    rows = []
    for path, label, unit in labels:
        before, after = (values.get((path, label, unit), (0, ())) for values in both)
        if _same(before[0], after[0]):
            continue
        numbers = before[1] or after[1]
        rows.append(
            {
                "module": with_numbers(path, numbers),
                "label": label,
                "unit": unit,
                "before": before[0],
                "after": after[0],
                "more_is_better": False,
            }
        )
    return rows


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * max(abs(one), abs(other))


Values = dict[tuple[str, str, str], tuple[float, Numbers]]


def _module_values(page: Page) -> Values:
    view = page["views"]["modules"]
    if "missing" in view:
        return {}
    values: Values = {}
    for row in view["rows"]:
        path, numbers = without_numbers(row["path"])
        for column, value in zip(view["columns"], row["values"], strict=True):
            label = column["label"] + (", count" if column["unit"] == "short" else "")
            key = (path, label, column["unit"])
            sum_, seen = values.get(key, (0, ()))
            values[key] = (sum_ + value, united(seen, numbers))
    return values
