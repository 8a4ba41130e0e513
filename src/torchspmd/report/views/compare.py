"""Two results side by side: figures, communication by kind, and by module."""

import shlex
from collections import defaultdict
from typing import Any

from torchspmd.report.results import ledger_of
from torchspmd.report.views.parts import Document, Page, View, figure, missing, plural
from torchspmd.report.views.paths import Numbers, united, with_numbers, without_numbers

_MORE_IS_BETTER = frozenset({"MFU", "margin", "that fit"})
_OPEN = "A comparison has one for each result: choose one of the two above."

_NAMES = ("label", "unit", "kind", "axis", "phase", "path")  # that tell rows apart
_KIND_FIGURES = (("count", "n"), ("payload", "B"))

Row = dict[str, Any]


def comparison_page(document: Document, pages: list[Page], names: list[str]) -> Page:
    """The page of two results, which are pages inside of it."""
    for page, name in zip(pages, names, strict=True):
        page["name"] = name
        page.pop("pages", None)
    before, after = (
        comparable(page, document[side])
        for page, side in zip(pages, ("before", "after"), strict=True)
    )
    figures = _joined(before["figures"], after["figures"], None, keep_same=True)
    modules = _joined(before["modules"], after["modules"], 0)
    kinds = None
    if before["kinds"] is not None and after["kinds"] is not None:
        kinds = _joined(before["kinds"], after["kinds"], 0)
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


def comparable(page: Page, document: Document) -> dict[str, list[Row] | None]:
    """What of a result can stand beside another: rows with a ``value``.

    The page joins those of two candidates of a search as ``_joined`` does here.
    """
    return {
        "figures": _figures(page),
        "kinds": _kinds(document),
        "modules": _modules(page),
    }


def _joined(
    before: list[Row] | None,
    after: list[Row] | None,
    absent: Any,
    *,
    keep_same: bool = False,
) -> list[Row]:
    """Rows of both with their values as ``before`` and ``after``.

    Args:
        before: Rows of the first result.
        after: Of the second.
        absent: The value of a row that only the other result has.
        keep_same: Also those that do not differ.
    """
    both = [{_key(row): row for row in rows or ()} for rows in (before, after)]
    joined = []
    for key in dict.fromkeys([*both[0], *both[1]]):
        one, other = (rows.get(key) for rows in both)
        row = dict(one or other or {})
        del row["value"]
        row["before"] = one["value"] if one else absent
        row["after"] = other["value"] if other else absent
        if keep_same or not _same(row["before"], row["after"]):
            joined.append(row)
    return joined


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row.get(name) for name in _NAMES)


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, int | float) or not isinstance(other, int | float):
        return bool(one == other)
    return abs(one - other) <= 1e-9 * max(abs(one), abs(other))


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


def _figures(page: Page) -> list[Row]:
    """The figures of a verdict, and what is held at the peak."""
    memory = page["views"]["memory"]
    figures = [
        *page["views"]["verdict"]["figures"],
        *(
            figure(f"{name} at the peak", value, "B")
            for name, value in (memory.get("by_category") or {}).items()
        ),
    ]
    if memory.get("margin_bytes") is not None:
        figures.append(figure("margin", memory["margin_bytes"], "B"))
    return [
        {
            "label": each["label"],
            "unit": each["unit"],
            "value": each["value"],
            "more_is_better": each["label"] in _MORE_IS_BETTER,
        }
        for each in figures
    ]


def _kinds(document: Document) -> list[Row] | None:
    """Count and payload of each kind of communication, where the result has a ledger."""
    ledger = ledger_of(dict(document))
    if ledger is None:
        return None
    sums: defaultdict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for row in ledger["totals"]:
        entry = sums[row["kind"], row["axis"], row["phase"]]
        entry[0] += row["count"]
        entry[1] += row["payload_bytes"]
    return [
        {
            "kind": kind,
            "axis": axis,
            "phase": phase,
            "label": label,
            "unit": unit,
            "value": value,
        }
        for (kind, axis, phase), entry in sums.items()
        for (label, unit), value in zip(_KIND_FIGURES, entry, strict=True)
    ]


def _modules(page: Page) -> list[Row]:
    """The figures of modules; those of numbered layers added up."""
    view = page["views"]["modules"]
    if "missing" in view:
        return []
    values: dict[tuple[str, str, str], tuple[float, Numbers]] = {}
    for row in view["rows"]:
        path, numbers = without_numbers(row["path"])
        for column, value in zip(view["columns"], row["values"], strict=True):
            label = column["label"] + (", count" if column["unit"] == "short" else "")
            key = (path, label, column["unit"])
            sum_, seen = values.get(key, (0, ()))
            values[key] = (sum_ + value, united(seen, numbers))
    return [
        {
            "path": path,
            "module": with_numbers(path, numbers),
            "label": label,
            "unit": unit,
            "value": value,
            "more_is_better": False,
        }
        for (path, label, unit), (value, numbers) in values.items()
    ]
