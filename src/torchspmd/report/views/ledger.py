"""A ledger: what was sent, by module, kind and group; it has no times and no memory."""

from collections import defaultdict
from typing import Any

from torchspmd.comm import Group, Phase, format_bytes
from torchspmd.comm.folding import fold, unfold
from torchspmd.report.views.parts import (
    PREDICT,
    Document,
    Page,
    View,
    around,
    column,
    figure,
    missing,
    one_result,
    plural,
)

_MOST = 12  # rows of the verdict


def ledger_page(document: Document) -> Page:
    """The page of what ``torchspmd trace`` recorded."""
    about = document.get("about") or {}
    world_size = about.get("world_size")
    ranks = about.get("num_ranks", 1)
    where = []
    if world_size is not None:
        played = f"rank {about.get('rank', 0)} of {world_size}"
        where.append(f"the sum of {plural(ranks, 'rank')}" if ranks > 1 else played)
    if about.get("steps") is not None:
        where.append(plural(about["steps"], "optimizer step"))
    where.append(f"torch {document.get('torch', '?')}")
    return {
        "kind": "ledger",
        "title": about.get("script") or "Communication ledger",
        "subtitle": " · ".join(where),
        "views": {
            "verdict": _verdict(document, about, ranks),
            "timeline": missing(
                "A ledger has no times: it says what is sent, not when.", PREDICT
            ),
            "memory": missing("A ledger has no allocations.", PREDICT),
            "modules": ledger_modules(document),
            "mesh": ledger_mesh(document, about),
            "compare": one_result(
                "torchspmd diff before.json after.json --html page.html"
            ),
            "assumptions": _assumptions(document),
        },
    }


def sums(rows: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Communications, payload bytes and wire bytes of rows."""
    return (
        sum(row["count"] for row in rows),
        sum(row["payload_bytes"] for row in rows),
        sum(row["wire_bytes"] for row in rows),
    )


def _verdict(document: Document, about: Document, ranks: int) -> View:
    rows = document["totals"]
    count, payload, wire = sums(rows)
    implicit, implicit_bytes, _ = sums([row for row in rows if row["implicit"]])
    modules = len({row["module"] for row in rows})
    text = f"{format_bytes(round(wire / ranks))} sent by a rank"
    return {
        "answer": {
            "text": text if count else "Nothing is sent",
            "tone": "warn" if implicit else "neutral",
            "detail": f"{plural(count, 'communication')} of {plural(modules, 'module')}"
            + (
                f"; {implicit} were implicit: DTensor redistributed an operand by itself"
                if implicit
                else ""
            ),
        },
        "figures": [
            figure("communications", count),
            figure("payload", payload, "B"),
            figure("wire bytes, a rank", round(wire / ranks), "B"),
            figure("implicit", implicit, "n", format_bytes(implicit_bytes)),
            figure("groups", len(document["groups"])),
        ],
        "causes": {
            "title": "What sends most",
            "none": "Nothing was sent.",
            "columns": [
                column("module", "module", "module"),
                column("kind", "kind"),
                column("axis", "axis"),
                column("phase", "phase"),
                column("count", "count", "n"),
                column("payload", "payload", "B", bar=True),
            ],
            "rows": _largest(rows),
        },
        "tables": [kind_table(rows)],
        "notes": note_lines(document),
        "command": about.get("command"),
    }


def _largest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with most payload, like ones of numbered layers in one."""
    contents: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        entry = contents[row["module"], row["kind"], row["axis"], row["phase"]]
        entry[0] += row["count"]
        entry[1] += row["payload_bytes"]
    folded = fold(
        (module, (kind, axis, phase, count, payload))
        for (module, kind, axis, phase), (count, payload) in contents.items()
    )
    result: list[dict[str, Any]] = []
    for path, (kind, axis, phase, count, payload) in folded:
        times = len(unfold(path))
        result.append(
            {
                "module": path,
                "kind": kind,
                "axis": axis,
                "phase": phase,
                "count": count * times,
                "payload": payload * times,
            }
        )
    return sorted(result, key=lambda row: -int(row["payload"]))[:_MOST]


def kind_table(rows: list[dict[str, Any]]) -> View:
    """Sums by kind, axis, dtype and phase."""
    fields = ("kind", "axis", "dtype", "phase")
    totals: defaultdict[tuple[str, ...], list[int]] = defaultdict(lambda: [0, 0, 0])
    for row in rows:
        entry = totals[tuple(row[field] for field in fields)]
        for place, name in enumerate(("count", "payload_bytes", "wire_bytes")):
            entry[place] += row[name]
    return {
        "title": "By kind",
        "columns": [
            *(column(name, name) for name in fields),
            column("count", "count", "n"),
            column("payload", "payload", "B", bar=True),
            column("wire", "wire", "B"),
        ],
        "rows": [
            {
                **dict(zip(fields, key, strict=True)),
                "count": count,
                "payload": payload,
                "wire": wire,
            }
            for key, (count, payload, wire) in totals.items()
        ],
    }


def ledger_modules(document: Document) -> View:
    """Every module with what it and those inside it sent."""
    rows = document["totals"]
    if not rows:
        return missing("Nothing was sent, so there is no module to show.")
    phases = [p.value for p in Phase if any(row["phase"] == p.value for row in rows)]
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    columns = [
        *(column(phase, phase, "n") for phase in phases),
        column("count", "communications", "n", bar=True),
        column("payload", "payload", "B", bar=True),
        *(column(axis, f"wire, {axis}", "B", bar=True) for axis in axes),
    ]
    values: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for row in rows:
        for path in around(row["module"]):
            entry = values[path]
            for key, value in (
                (row["phase"], row["count"]),
                ("count", row["count"]),
                ("payload", row["payload_bytes"]),
                (f"axis {row['axis']}", row["wire_bytes"]),
            ):
                entry[key] = entry.get(key, 0) + value
    keys = [*phases, "count", "payload", *(f"axis {axis}" for axis in axes)]
    return {
        "columns": columns,
        "rows": [
            {"path": path, "values": [entry.get(key, 0) for key in keys]}
            for path, entry in values.items()
        ],
        "note": "Figures include the modules inside; Global is outside of every module.",
    }


def ledger_mesh(document: Document, about: Document) -> View:
    """The groups, with what one rank sent in them."""
    if not document["groups"]:
        return missing("No group has sent anything, so there is no mesh to show.")
    ranks = about.get("num_ranks", 1)
    sent = _sent_by_group(document, ranks)
    groups = []
    for place, group in enumerate(document["groups"]):
        count, payload, wire = (round(value / ranks) for value in sent[place])
        groups.append(
            {
                **group,
                "axis": _label(group),
                "count": count,
                "payload_bytes": payload,
                "wire_bytes": wire,
            }
        )
    highest = max((max(g["ranks"], default=0) for g in groups), default=0)
    return {
        "world_size": about.get("world_size") or highest + 1,
        "rank": about.get("rank", 0),
        "gpus_per_node": about.get("gpus_per_node"),
        "axes": [],
        "groups": groups,
    }


def _sent_by_group(document: Document, ranks: int) -> list[list[int]]:
    """Count, payload and wire bytes of each group.

    Events tell them apart. Rows of totals know the axis only: groups of one axis that
    several ranks used are alike, those of one rank share what the axis sent.
    """
    names = ("count", "payload_bytes", "wire_bytes")
    sums = [[0, 0, 0] for _ in document["groups"]]
    if ranks == 1 and not document.get("dropped_events"):
        for event in document["events"]:
            entry = sums[event["group"]]
            for place, value in enumerate((1, *(event[name] for name in names[1:]))):
                entry[place] += value
        return sums
    labels = [_label(group) for group in document["groups"]]
    for row in document["totals"]:
        places = [place for place, label in enumerate(labels) if label == row["axis"]]
        for place in places:
            for which, name in enumerate(names):
                share = row[name] if ranks > 1 else row[name] // len(places)
                sums[place][which] += share
    return sums


def _label(group: Document) -> str:
    """What the rows call a group: its axis, else its ranks as text."""
    return Group(group["name"], tuple(group["ranks"]), group["axis"]).label


def note_lines(document: Document) -> list[str]:
    """What a reader of the numbers must know."""
    lines = [
        text + (f" ({times} times)" if times > 1 else "")
        for text, times in document["notes"].items()
    ]
    if document.get("dropped_events"):
        lines.append(
            f"{document['dropped_events']} single events were not kept; counts and bytes "
            "include them."
        )
    return lines


def _assumptions(document: Document) -> View:
    return {
        "rows": [
            {
                "what": "wire bytes",
                "value": "what one rank sends in a ring, on average over its group",
                "source": "closed formulas for each kind",
                "error": None,
            }
        ],
        "lists": [["Notes", note_lines(document)]],
    }
