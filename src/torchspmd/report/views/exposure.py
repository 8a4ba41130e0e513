"""The measured exposure of a compiled step: how long computation waits, and why."""

from collections import defaultdict
from typing import Any

from torchspmd.report.views.parts import (
    PREDICT,
    Document,
    Page,
    View,
    around,
    column,
    figure,
    missing,
    notes_view,
    one_result,
)

_SECONDS = 1e-3  # a millisecond


def exposure_page(document: Document) -> Page:
    """The page of ``CompiledStep.exposure()``."""
    runs = document.get("runs", "?")
    return {
        "kind": "exposure",
        "title": document.get("program") or "Measured exposure",
        "subtitle": f"rank {document.get('rank', 0)} · {document.get('device', '?')} · "
        f"{document.get('form', '?')} · median of {runs} runs",
        "views": {
            "verdict": _verdict(document),
            "timeline": missing(
                "The clock measures waits for collectives, not every operator.", PREDICT
            ),
            "memory": missing("The clock does not measure memory.", PREDICT),
            "modules": _modules(document),
            "mesh": missing(
                "A measured exposure does not say which ranks are in a group.",
                "torchspmd trace train.py --world-size 8 --html page.html",
            ),
            "compare": one_result(),
            "assumptions": notes_view(document, "The measurement comes without notes."),
        },
    }


def _verdict(document: Document) -> View:
    step, exposed = document["step_ms"], document["exposed_ms"]
    collectives = document["collectives"]
    seen = [each for each in collectives if not each["is_hidden"]]
    share = exposed / step if step else 0.0
    return {
        "answer": {
            "text": f"{share:.0%} of the step waits for communication",
            "tone": "good" if share < 0.02 else "warn",
            "detail": f"{exposed:.2f} ms of {step:.2f} ms, {len(seen)} of "
            f"{len(collectives)} collectives",
        },
        "figures": [
            figure("step", step * _SECONDS, "s"),
            figure("exposed", exposed * _SECONDS, "s"),
            figure(
                "exposed in the simulation", document["simulated_ms"] * _SECONDS, "s"
            ),
            figure(
                "exposed on all ranks",
                document["everywhere_ms"] * _SECONDS,
                "s",
                "without waits for late ranks",
            ),
            figure("collectives", len(collectives)),
        ],
        "step": {
            "parts": [
                {
                    "name": "computation",
                    "seconds": max(0.0, step - exposed) * _SECONDS,
                    "colour": "compute",
                },
                {
                    "name": "exposed communication",
                    "seconds": exposed * _SECONDS,
                    "colour": "exposed",
                },
            ],
            "total": step * _SECONDS,
            "note": None,
        },
        "causes": _causes(collectives),
        "notes": [
            "Each time is a median of its own: those of collectives need not add up."
        ],
        "command": None,
        "no_command": "Measured inside of a program, by step.exposure(...).",
    }


def _causes(collectives: list[dict[str, Any]]) -> View:
    return {
        "title": "Every collective, the longest exposed first",
        "none": "No collective is waited for.",
        "columns": [
            column("seconds", "exposed", "s", bar=True),
            column("simulated", "simulated", "s"),
            column("distance", "start to wait", "s"),
            column("what", "of"),
            column("kind", "kind"),
            column("axis", "axis"),
            column("bytes", "payload", "B"),
            column("reason", "why"),
        ],
        "rows": [
            {
                "seconds": each["exposed_ms"] * _SECONDS,
                "simulated": None
                if each["simulated_ms"] is None
                else each["simulated_ms"] * _SECONDS,
                "distance": each["distance_ms"] * _SECONDS,
                "what": each["what"],
                "kind": each["kind"],
                "axis": each["axis"],
                "bytes": each["payload_bytes"],
                "reason": each["reason"] or "hidden",
            }
            for each in sorted(collectives, key=lambda e: -float(e["exposed_ms"]))
        ],
    }


def _modules(document: Document) -> View:
    """A collective of several modules counts for each of them, in equal parts."""
    values: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in document["collectives"]:
        modules = each["modules"] or ["Global"]
        for module in modules:
            for path in around(module):
                values[path][0] += each["exposed_ms"] * _SECONDS / len(modules)
                values[path][1] += each["payload_bytes"] / len(modules)
    if not values:
        return missing("No collective is waited for, so no module is shown.")
    return {
        "columns": [
            column("exposed", "exposed", "s", bar=True),
            column("payload", "payload", "B", bar=True),
        ],
        "rows": [{"path": path, "values": entry} for path, entry in values.items()],
        "note": "A bucket counts in equal parts for the modules whose tensors it carries.",
    }
