"""The preview of a plan: which rank holds which part of each parameter."""

import math
from typing import Any

from torchspmd.comm import format_bytes
from torchspmd.comm.folding import fold, unfold
from torchspmd.report.views.parts import (
    PREDICT,
    Document,
    Page,
    View,
    column,
    figure,
    missing,
    notes_view,
    one_result,
    plural,
)

_MOST = 12  # rows of the verdict


def plan_page(document: Document) -> Page:
    """The page of what ``torchspmd plan`` shows."""
    mesh: dict[str, int] = document["mesh"]
    axis = document["axis"]
    text = ", ".join(f"{name}={size}" for name, size in mesh.items())
    return {
        "kind": "plan",
        "title": f"Plan of {document.get('model', 'a model')}",
        "subtitle": f"over {axis}={mesh[axis]} · mesh {text}",
        "views": {
            "verdict": _verdict(document, mesh[axis]),
            "timeline": missing("A plan has no times: nothing was run.", PREDICT),
            "memory": missing(
                "A plan knows the bytes of parameters only; they are in Modules.",
                PREDICT,
            ),
            "modules": _modules(document),
            "mesh": _mesh(document, mesh, axis),
            "compare": one_result(),
            "assumptions": notes_view(document, "The plan rests on no assumption."),
        },
    }


def _verdict(document: Document, size: int) -> View:
    rows = document["parameters"]
    communication = document.get("communication")
    sent = (
        None if communication is None else sum(r["wire_bytes"] for r in communication)
    )
    total, first = document["total_bytes"], document["bytes_on_rank_0"]
    count = sum(row["count"] for row in rows)
    whole = f"{first / total:.0%} of the model" if total else None
    ask = None if sent is not None else "give --batch and --seq to see it"
    return {
        "answer": {
            "text": "The plan matches the model",
            "tone": "good",
            "detail": f"a rank holds {format_bytes(first)} of {format_bytes(total)}, "
            f"{plural(count, 'parameter')} in all",
        },
        "figures": [
            figure("parameters on rank 0", first, "B", whole),
            figure("in all", total, "B"),
            figure("replicated", document["replicated_bytes"], "B", "on every rank"),
            figure("ranks of the axis", size),
            figure("sent by a rank", sent, "B", ask or "one forward and backward"),
        ],
        "causes": {
            "title": "What sends most",
            "none": "No input shape was given, so communication is not known: pass "
            "--batch and --seq."
            if communication is None
            else "The plan sends nothing.",
            "columns": [
                column("module", "module", "module"),
                column("kind", "kind"),
                column("phase", "phase"),
                column("count", "count", "n"),
                column("wire_bytes", "a rank sends", "B", bar=True),
            ],
            "rows": _largest(communication or [])[:_MOST],
        },
        "notes": list(document.get("notes") or []),
        "command": document.get("command"),
    }


def _largest(communication: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What sends most, layers folded; paths as the parameters have them."""
    contents = (
        (row["module"], (row["kind"], row["phase"], row["count"], row["wire_bytes"]))
        for row in communication
    )
    rows: list[dict[str, Any]] = []
    for path, (kind, phase, count, wire) in fold(contents):
        times = len(unfold(path))
        rows.append(
            {
                "module": path.partition(".")[2] or path,
                "kind": kind,
                "phase": phase,
                "count": count * times,
                "wire_bytes": wire * times,
            }
        )
    return sorted(rows, key=lambda row: -int(row["wire_bytes"]))


def _modules(document: Document) -> View:
    return {
        "what": "parameter",
        "foldable": False,
        "texts": ["style", "layout"],
        "columns": [
            column("count", "parameters", "n"),
            column("local", "on a rank", "B", bar=True),
            column("total", "in all", "B", bar=True),
        ],
        "rows": [
            {
                "path": row["name"],
                "class": f"{' x '.join(map(str, row['shape'])) or 'scalar'} {row['dtype']}",
                "texts": [row["style"], row["layout"]],
                "values": [row["count"], row["local_bytes"][0], row["total_bytes"]],
            }
            for row in document["parameters"]
        ],
        "note": "Like parameters of numbered layers are one row, with their sum.",
    }


def _mesh(document: Document, mesh: dict[str, int], axis: str) -> View:
    return {
        "world_size": math.prod(mesh.values()),
        "rank": 0,
        "gpus_per_node": None,
        "axes": [{"name": name, "size": size} for name, size in mesh.items()],
        "groups": [],
        "no_groups": "A plan is not run: no group has sent anything yet.",
        "plan_axis": axis,
        "plan_size": mesh[axis],
        "parameters": document["parameters"],
    }
