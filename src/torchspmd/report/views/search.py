"""All candidates of a search: which are worth having, and why the others are not."""

from typing import Any

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


def search_page(document: Document) -> Page:
    """The page of what ``torchspmd search`` tried; a page inside for each candidate."""
    candidates: list[dict[str, Any]] = []
    pages: list[Page] = []
    front = pareto_front(document["candidates"])
    best = _best(document["candidates"])
    for place, each in enumerate(document["candidates"]):
        name = candidate_name(each)
        page = None
        if each.get("prediction"):
            page = len(pages)
            pages.append({**prediction_page(each["prediction"]), "name": name})
        candidates.append(
            {
                **{key: value for key, value in each.items() if key != "prediction"},
                "name": name,
                "place": place,
                "page": page,
                "front": place in front,
                "best": place == best,
            }
        )
    gpu = document.get("gpu")
    parts = [plural(len(candidates), "candidate")]
    if document.get("world_size"):
        parts.append(plural(document["world_size"], "rank"))
    return {
        "kind": "search",
        "title": document.get("script") or "Search",
        "subtitle": " · ".join([*parts, *([str(gpu)] if gpu else [])]),
        "whole": "the whole search",
        "opens": "compare",
        "pages": pages,
        "views": {
            "verdict": _verdict(document, candidates, best),
            "timeline": missing(
                "Candidates of a search are kept without their timelines; predict the one "
                "that you want to see.",
                _predict(document, candidates, best),
            ),
            **{view: missing(_OPEN) for view in ("memory", "modules", "mesh")},
            "compare": {
                "candidates": candidates,
                "device_bytes": document.get("device_bytes"),
            },
            "assumptions": _assumptions(document),
        },
    }


def candidate_name(candidate: Document) -> str:
    """Its arguments as text.

    >>> candidate_name({"arguments": {"tp": 8, "ac": "none"}})
    'tp=8 ac=none'
    """
    return " ".join(f"{key}={value}" for key, value in candidate["arguments"].items())


def pareto_front(candidates: list[dict[str, Any]]) -> set[int]:
    """Places of those that fit and that no other one beats in time and in memory."""
    known = [
        (each["step_seconds"], each["peak_bytes"], place)
        for place, each in enumerate(candidates)
        if each["fits"] != "no"
        and each.get("step_seconds") is not None
        and each.get("peak_bytes") is not None
    ]
    front, least = set(), None
    for _, peak, place in sorted(known):
        if least is None or peak < least:
            front.add(place)
            least = peak
    return front


def _best(candidates: list[dict[str, Any]]) -> int | None:
    """The fastest that fits; one at risk only where none does."""
    for fits in ("yes", "at risk"):
        known = [
            (each["step_seconds"], place)
            for place, each in enumerate(candidates)
            if each["fits"] == fits and each.get("step_seconds") is not None
        ]
        if known:
            return min(known)[1]
    return None


def _verdict(
    document: Document, candidates: list[dict[str, Any]], best: int | None
) -> View:
    fitting = [each for each in candidates if each["fits"] == "yes"]
    found = None if best is None else candidates[best]
    nearest = min(
        (each for each in candidates if each.get("peak_bytes")),
        key=lambda each: int(each["peak_bytes"]),
        default=None,
    )
    if found is not None:
        answer = {
            "text": found["name"],
            "tone": "good" if found["fits"] == "yes" else "warn",
            "detail": "is the fastest candidate that fits"
            if found["fits"] == "yes"
            else "is the fastest candidate; its memory is at risk",
        }
    else:
        closest = f"; the smallest is {nearest['name']}" if nearest else ""
        answer = {
            "text": "No candidate fits",
            "tone": "bad",
            "detail": f"{plural(len(candidates), 'candidate')} were tried{closest}",
        }
    return {
        "answer": answer,
        "figures": [
            figure("step", found and found["step_seconds"], "s"),
            figure("peak", found and found["peak_bytes"], "B"),
            figure("MFU", found and found.get("mfu"), "%"),
            figure("candidates", len(candidates)),
            figure("that fit", len(fitting)),
        ],
        "causes": {
            "title": "The front: nothing is both faster and smaller",
            "none": "No candidate fits.",
            "columns": [
                column("name", "candidate"),
                column("step_seconds", "step", "s", bar=True),
                column("peak_bytes", "peak", "B", bar=True),
                column("fits", "fits"),
            ],
            "rows": sorted(
                (each for each in candidates if each["front"]),
                key=lambda each: float(each["step_seconds"]),
            ),
        },
        "notes": [],
        "command": document.get("command"),
    }


def _predict(
    document: Document, candidates: list[dict[str, Any]], best: int | None
) -> str:
    if best is not None and candidates[best].get("command"):
        return str(candidates[best]["command"])
    return f"torchspmd predict {document.get('script') or 'train.py'} --html page.html"


def _assumptions(document: Document) -> View:
    notes, rows = document.get("notes") or [], document.get("assumptions") or []
    if not rows and not notes:
        return missing("The search names no figure that it used; open a candidate.")
    return {"rows": rows, "lists": [["Notes", notes]]}
