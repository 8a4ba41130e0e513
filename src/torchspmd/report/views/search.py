"""All candidates of a search: which are worth having, and why the others are not."""

from typing import Any

from torchspmd.comm import format_bytes
from torchspmd.report.views.compare import comparable
from torchspmd.report.views.parts import (
    Document,
    Page,
    View,
    column,
    figure,
    missing,
    plural,
)
from torchspmd.report.views.prediction import prediction_page

_OPEN = "A search has one for each candidate: open one in Compare, or choose it above."
_NONE = (
    "The search kept no prediction of its candidates; predict the one you want to see."
)
_FIGURES = ("mfu", "exposed_seconds", "work_per_second", "pareto")


def search_page(document: Document) -> Page:
    """The page of what ``torchspmd search`` tried; a page inside for each candidate."""
    unit = document.get("unit") or "item"
    candidates: list[dict[str, Any]] = []
    pages: list[Page] = []
    for place, each in enumerate(document["candidates"]):
        name = candidate_name(each)
        page = None
        if each.get("prediction"):
            page = len(pages)
            inner = prediction_page(each["prediction"])
            both = comparable(inner, each["prediction"])
            pages.append({**inner, "name": name, "comparable": both})
        candidates.append(
            {
                **{key: each.get(key) for key in _FIGURES},
                "values": each["values"],
                "fits": each["fits"] or _not_predicted(each),
                "step_seconds": each.get("step_seconds"),
                "seconds": _seconds(each),
                "peak_bytes": each.get("device_peak_bytes"),
                "why_not": _why_not(each, document),
                "name": name,
                "place": place,
                "page": page,
                "best": document.get("best") == each["values"],
            }
        )
    rated = any(each["work_per_second"] for each in candidates)
    lacks = missing(_OPEN if pages else _NONE, None if pages else _predict(document))
    return {
        "kind": "search",
        "title": document.get("script") or "Search",
        "subtitle": " · ".join(_subtitle(document, len(candidates))),
        "whole": "the whole search",
        "opens": "compare",
        "pages": pages,
        "views": {
            "verdict": _verdict(document, candidates),
            "timeline": missing(
                "Candidates of a search are kept without their timelines; predict the one "
                "that you want to see.",
                _predict(document),
            ),
            **dict.fromkeys(("memory", "modules", "mesh"), lacks),
            "compare": {
                "candidates": candidates,
                "time": f"time per {unit}" if rated else "step time",
                "unit": unit,
                "device_bytes": document.get("device_bytes"),
            },
            "assumptions": _assumptions(document),
        },
    }


def candidate_name(candidate: Document) -> str:
    """Its arguments as text.

    >>> candidate_name({"values": {"tp": 8, "ac": "none"}})
    'tp=8 ac=none'
    """
    return " ".join(f"{key}={value}" for key, value in candidate["values"].items())


def _seconds(candidate: Document) -> float | None:
    """By which candidates are compared: for a unit of work, else for a step."""
    rate = candidate.get("work_per_second")
    if rate:
        return float(1 / rate)
    seconds = candidate.get("step_seconds")
    return None if seconds is None else float(seconds)


def _not_predicted(candidate: Document) -> str:
    """Whether it failed, or was not worth a whole rehearsal."""
    is_left_out = str(candidate.get("problem")).startswith("left out")
    return "left out" if is_left_out else "failed"


def _why_not(candidate: Document, document: Document) -> str | None:
    if candidate.get("problem"):
        return str(candidate["problem"]).removeprefix("left out: ")
    peak, has = candidate.get("device_peak_bytes"), document.get("device_bytes")
    if candidate["fits"] == "yes" or peak is None:
        return None
    return f"needs {format_bytes(peak)}" + (f" of {format_bytes(has)}" if has else "")


def _subtitle(document: Document, count: int) -> list[str]:
    parts = [plural(count, "candidate")]
    if document.get("world_size"):
        parts.append(plural(document["world_size"], "rank"))
    return [*parts, str(document["gpu"])] if document.get("gpu") else parts


def _verdict(document: Document, candidates: list[dict[str, Any]]) -> View:
    fitting = [each for each in candidates if each["fits"] == "yes"]
    found = next((each for each in candidates if each["best"]), None)
    unit = document.get("unit") or "item"
    return {
        "answer": _answer(candidates, found),
        "figures": [
            figure("step", found and found["step_seconds"], "s"),
            figure(f"{unit}/s", found and found["work_per_second"], "short"),
            figure("peak", found and found["peak_bytes"], "B"),
            figure("MFU", found and found["mfu"], "%"),
            figure("candidates", len(candidates)),
            figure("that fit", len(fitting)),
        ],
        "causes": {
            "title": "The Pareto front: nothing is both faster and smaller",
            "none": "No candidate fits.",
            "columns": [
                column("name", "candidate"),
                column("seconds", f"time per {unit}", "s", bar=True),
                column("step_seconds", "step", "s"),
                column("peak_bytes", "peak", "B", bar=True),
                column("fits", "fits"),
            ],
            "rows": sorted(
                (each for each in candidates if each["pareto"]),
                key=lambda each: float(each["seconds"] or 0),
            ),
        },
        "notes": [],
        "command": document.get("command"),
    }


def _answer(
    candidates: list[dict[str, Any]], found: dict[str, Any] | None
) -> dict[str, str]:
    if found is not None:
        sure = found["fits"] == "yes"
        more = "" if sure else "; its memory is at risk"
        return {
            "text": found["name"],
            "tone": "good" if sure else "warn",
            "detail": f"is the fastest candidate that fits{more}",
        }
    nearest = min(
        (each for each in candidates if each["peak_bytes"]),
        key=lambda each: int(each["peak_bytes"]),
        default=None,
    )
    closest = f"; the smallest is {nearest['name']}" if nearest else ""
    return {
        "text": "No candidate fits" if nearest else "No candidate was predicted",
        "tone": "bad",
        "detail": f"{plural(len(candidates), 'candidate')} were tried{closest}",
    }


def _predict(document: Document) -> str:
    best = document.get("best")
    for each in document["candidates"]:
        if each.get("command") and (best is None or each["values"] == best):
            return str(each["command"])
    return f"torchspmd predict {document.get('script') or 'train.py'} --html page.html"


def _assumptions(document: Document) -> View:
    notes, rows = document.get("notes") or [], document.get("assumptions") or []
    if not rows and not notes:
        return missing("The search names no figure that it used; open a candidate.")
    return {"rows": rows, "lists": [["Notes", notes]]}
