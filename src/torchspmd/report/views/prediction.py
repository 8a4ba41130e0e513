"""A prediction: every view has data, but for what the command left out."""

import re
from collections.abc import Iterator
from typing import Any

from torchspmd.comm import format_bytes
from torchspmd.report.views.ledger import kind_table
from torchspmd.report.views.parts import (
    PREDICT,
    Document,
    Page,
    View,
    column,
    figure,
    missing,
    one_result,
    plural,
    used,
)
from torchspmd.report.views.paths import Numbers, united, with_numbers, without_numbers

_MOST = 12  # exposed collectives of the verdict
_ANSWERS = {
    "yes": ("Fits", "good"),
    "at risk": ("At risk", "warn"),
    "no": ("Does not fit", "bad"),
}
_MODULE_FIGURES = (
    ("parameters", "parameters", "short"),
    ("parameter_bytes", "parameter bytes", "B"),
    ("gradient_bytes", "gradients", "B"),
    ("state_bytes", "optimizer states", "B"),
    ("activation_bytes", "activations", "B"),
    ("flops", "FLOPs", "flop"),
    ("seconds", "time", "s"),
    ("exposed_seconds", "exposed", "s"),
)


def prediction_page(document: Document) -> Page:
    """The page of what ``torchspmd predict`` found."""
    return {
        "kind": "prediction",
        "title": document.get("script") or "Prediction",
        "subtitle": " · ".join(_subtitle(document)),
        "views": {
            "verdict": _verdict(document),
            "timeline": _timeline(document),
            "memory": _memory(document),
            "modules": prediction_modules(document),
            "mesh": _mesh(document),
            "compare": one_result(),
            "assumptions": _assumptions(document),
        },
    }


def _subtitle(document: Document) -> Iterator[str]:
    yield f"rank {document.get('rank', 0)} of {document.get('world_size', '?')}"
    if document.get("gpu"):
        each = document.get("gpus_per_node")
        yield f"{document['gpu']}{f', {each} in a node' if each else ''}"
    if document.get("network"):
        yield str(document["network"])
    axes = (document.get("mesh") or {}).get("axes") or []
    if axes:
        yield "mesh " + ", ".join(f"{axis['name']}={axis['size']}" for axis in axes)
    if document.get("steps"):
        yield f"{plural(document['steps'], 'step')} rehearsed"


def _verdict(document: Document) -> View:
    text, tone = _ANSWERS.get(
        document["fits"], (f"Fits: {document['fits']}", "neutral")
    )
    return {
        "answer": {"text": text, "tone": tone, "detail": _memory_sentence(document)},
        "figures": _figures(document),
        "step": _step(document),
        "causes": _causes(document),
        "suggestions": [
            {
                "what": each["what"],
                "value": each.get("gain_seconds") or each.get("gain_bytes"),
                "unit": "s" if each.get("gain_seconds") else "B",
                "module": each.get("module"),
                "how": each.get("how"),
            }
            for each in document.get("suggestions") or []
        ],
        "tables": _tables(document),
        "notes": [],
        "command": document.get("command"),
    }


def _memory_sentence(document: Document) -> str:
    memory = document["memory"] or {}
    needs, has = memory.get("device_peak_bytes"), memory.get("device_bytes")
    if needs is None or has is None:
        return "the prediction does not say how much of the device is used"
    text = f"{format_bytes(needs)} of {format_bytes(has)} in use at the peak"
    margin = has - needs
    text += f", {format_bytes(abs(margin))} {'left' if margin >= 0 else 'too much'}"
    failure = memory.get("first_failure")
    if failure:
        place = failure.get("module") or "the script"
        text += (
            f"; the first allocation without memory: {format_bytes(failure['bytes'])} in "
            f"{place}, {failure.get('phase', '')}"
        )
        if failure.get("operator"):
            text += f" ({failure['operator']})"
    return f"{text}.{_of_worst_stage(document)}"


def _of_worst_stage(document: Document) -> str:
    """Of a pipeline, another stage may need more."""
    stages = document.get("stages") or {}
    known = {rank: each["memory"] for rank, each in stages.items() if each["memory"]}
    rank = min(known, key=lambda each: known[each]["margin_bytes"], default=None)
    if rank is None or int(rank) == document.get("rank", 0):
        return ""
    needs = format_bytes(known[rank]["device_peak_bytes"])
    return f" Rank {rank}, another stage of the pipeline, needs the most: {needs}."


def _figures(document: Document) -> list[dict[str, Any]]:
    memory = document["memory"] or {}
    error = document.get("step_error")
    step = document.get("step_seconds")
    exposed = document.get("exposed_seconds")
    groups = (document.get("mesh") or {}).get("groups") or []
    note = None if error is None else f"± {100 * error:.0f} % expected"
    share = f"{100 * exposed / step:.1f} % of the step" if step and exposed else None
    figures = [
        figure("step", step, "s", note if step else _no_step(document)),
        figure("MFU", document.get("mfu"), "%"),
        figure("exposed communication", exposed, "s", share),
        figure("peak, allocated", memory.get("allocated_peak_bytes"), "B"),
        figure("peak, reserved", memory.get("reserved_peak_bytes"), "B"),
    ]
    sent = [group.get("wire_bytes") for group in groups]
    if sent and None not in sent:
        figures.append(figure("sent by the rank", sum(sent), "B"))
    return figures


def _no_step(document: Document) -> str:
    return "no time was predicted" if document.get("steps") else "the script made none"


def _step(document: Document) -> View | None:
    total = document.get("step_seconds")
    if not total:
        return None
    parts: list[dict[str, Any]] = [
        {"name": name, "seconds": document.get(key) or 0, "colour": colour}
        for name, key, colour in (
            ("computation", "compute_seconds", "compute"),
            ("exposed communication", "exposed_seconds", "exposed"),
            ("waits for the host", "host_seconds", "hostwait"),
            ("pipeline bubble", "bubble_seconds", "bubble"),
        )
    ]
    rest = total - sum(part["seconds"] for part in parts)
    if rest > 1e-3 * total:
        parts.append({"name": "other", "seconds": rest, "colour": "rest"})
    busy = document.get("communication_seconds")
    note = None
    if busy:
        hidden = max(0.0, busy - (document.get("exposed_seconds") or 0))
        note = (
            f"Communicators are busy for {_time(busy)}, of which {_time(hidden)} are "
            "hidden behind computation or each other."
        )
    return {"parts": parts, "total": total, "note": note}


def _time(seconds: float) -> str:
    """Seconds as the page writes them.

    >>> _time(0.0123), _time(13.27)
    ('12.3 ms', '13.27 s')
    """
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _causes(document: Document) -> View | None:
    exposed = document.get("exposed")
    if exposed is None or (not exposed and not document.get("step_seconds")):
        return None
    grouped = exposed_by_layers(exposed)
    rows = grouped[:_MOST]
    left = len(grouped) - len(rows)
    return {
        "title": "Why computation waits, the longest first"
        + (f" ({len(rows)} of {len(grouped)})" if left else ""),
        "none": "No communication is exposed.",
        "opens": True,
        "columns": [
            column("seconds", "exposed", "s", bar=True),
            column("count", "waits", "n"),
            column("bytes", "payload", "B"),
            column("kind", "for"),
            column("axis", "axis"),
            column("module", "module", "module"),
            column("cause", "why"),
        ],
        "rows": rows,
    }


def exposed_by_layers(exposed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Exposed communication with that of like modules in numbered layers added up."""
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    numbers: dict[tuple[Any, ...], Numbers] = {}
    for entry in exposed:
        path, found = without_numbers(entry["module"] or "")
        cause = entry.get("cause")
        key = (path, entry["kind"], entry["axis"], cause and _in_general(cause))
        row = sums.setdefault(
            key,
            {
                "kind": entry["kind"],
                "axis": entry["axis"],
                "cause": cause,
                "seconds": 0.0,
                "bytes": 0,
                "count": 0,
            },
        )
        if cause != row["cause"]:
            row["cause"] = _in_general(row["cause"])
        row["seconds"] += entry["seconds"]
        row["bytes"] += entry.get("bytes") or 0
        row["count"] += entry.get("count") or 1
        numbers[key] = united(numbers.get(key, ()), found)
        row["module"] = with_numbers(path, numbers[key])
    return sorted(sums.values(), key=lambda row: -float(row["seconds"]))


def _in_general(cause: str) -> str:
    """What is the same of like layers: without times, and numbers of modules.

    >>> _in_general("queued behind send of GPT.layers.3.mlp on the same communicator")
    'queued behind send of GPT.layers.*.mlp on the same communicator'
    >>> _in_general("longer (3.1 ms) than the computation that it overlaps with (1 ms)")
    'longer than the computation that it overlaps with'
    """
    return re.sub(r"\.\d+\b", ".*", re.sub(r" \([^)]*\)", "", cause))


def _tables(document: Document) -> list[View]:
    ledger = document.get("ledger")
    if not ledger or not ledger.get("totals"):
        return []
    return [{**kind_table(ledger["totals"]), "title": "Communication by kind"}]


def _timeline(document: Document) -> View:
    timeline = document.get("timeline")
    if timeline is None:
        why = "The prediction was made without a timeline."
        return missing(why, _command(document))
    if not timeline["start"]:
        return missing("The script made no step, so there is no timeline.", PREDICT)
    causes = [
        {"kind": each["kind"], "module": each["module"], "cause": each["cause"]}
        for each in document.get("exposed") or []
        if each.get("cause")
    ]
    return {**timeline, "causes": causes}


def _command(document: Document) -> str:
    """That gives what this prediction left out."""
    command = str(document.get("command") or PREDICT)
    for option in (" --no-timeline", " --brief"):
        command = command.replace(option, "")
    return command


def _memory(document: Document) -> View:
    memory = document.get("memory")
    if not memory:
        return missing("The prediction has no memory account.", PREDICT)
    why = "The prediction was kept with its peaks, but without the curve over the run."
    return {**memory, "no_curve": None if memory.get("curve") else why}


def prediction_modules(document: Document) -> View:
    """Every module with its figures; those of the communication by axis."""
    modules = document["modules"]
    if not modules:
        return missing(
            "The prediction was kept without its modules.", _command(document)
        )
    axes = list(dict.fromkeys(a for m in modules for a in m.get("bytes_by_axis") or {}))
    figures = [
        (key, label, unit)
        for key, label, unit in _MODULE_FIGURES
        if used(module.get(key) for module in modules)
    ]
    return {
        "columns": [
            *(
                column(k, label, unit, bar=k != "parameters")
                for k, label, unit in figures
            ),
            *(column(axis, f"payload, {axis}", "B", bar=True) for axis in axes),
        ],
        "rows": [
            {
                "path": module["path"],
                "class": module.get("class", ""),
                "values": [
                    *(module.get(key) or 0 for key, _, _ in figures),
                    *((module.get("bytes_by_axis") or {}).get(a, 0) for a in axes),
                ],
            }
            for module in modules
        ],
        "note": "Figures of a module include those of the modules inside it.",
    }


def _mesh(document: Document) -> View:
    mesh = document.get("mesh")
    if not mesh:
        return missing("The script made no process group, so there is no mesh.")
    return {
        "world_size": document["world_size"],
        "rank": document.get("rank", 0),
        "gpus_per_node": document.get("gpus_per_node"),
        "nodes": document.get("nodes") or [],
        "axes": mesh.get("axes") or [],
        "groups": mesh.get("groups") or [],
    }


# Figures of hardware files, by how their names begin: size of a unit, and its name.
_UNITS = (
    ("bandwidth.", 1e9, "GB/s"),
    ("network.port", 1e9, "GB/s"),
    ("flops.", 1e12, "TFLOP/s"),
    ("host_", 1e-6, "µs"),
    ("launch.", 1e-6, "µs"),
    ("network.latency", 1e-6, "µs"),
    ("chip.l2_bytes", 2**20, "MiB"),
    ("power.idle", 1, "W"),
    ("power.limit", 1, "W"),
)


def with_unit(what: str, value: object) -> object:
    """A figure of a hardware file as text with its unit; others as they are.

    >>> with_unit("bandwidth.memory", 3.35e12), with_unit("matmul.bfloat16", "278 rows")
    ('3350 GB/s', '278 rows')
    """
    if isinstance(value, int | float):
        for begin, size, unit in _UNITS:
            if what.startswith(begin):
                return f"{value / size:.4g} {unit}"
    return value


def _assumptions(document: Document) -> View:
    rows = [
        {**row, "value": with_unit(row["what"], row["value"])}
        for row in document.get("assumptions") or []
    ]
    named = {row["what"] for row in rows}
    fixed = (document.get("memory") or {}).get("fixed") or []
    rows += [
        {
            "what": f"memory of {part['name']}",
            "value": format_bytes(part["bytes"]),
            "source": part["source"],
            "error": None,
        }
        for part in fixed
        if part["name"] not in named
    ]
    if document.get("step_error") is not None:
        rows.append(
            {
                "what": "step time",
                "value": None,
                "source": document.get("step_error_source"),
                "error": document["step_error"],
            }
        )
    notes, skipped = document.get("notes") or [], document.get("skipped") or []
    if not rows and not notes and not skipped:
        return missing("The prediction names no figure that it used.")
    return {"rows": rows, "lists": [["Notes", notes], ["Not done", skipped]]}
