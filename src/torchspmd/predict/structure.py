"""The modules and the mesh of a prediction file, from a recording."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torchspmd.comm.kinds import Kind
from torchspmd.comm.measure import wire_bytes
from torchspmd.predict.memory import MemoryAccount
from torchspmd.predict.prediction import TimePrediction
from torchspmd.rehearse.recording import Category, Comm, Phase, Recording

__all__ = ["mesh_json", "modules_json"]

_KEYS = {
    Category.PARAMETER.value: "parameter_bytes",
    Category.GRADIENT.value: "gradient_bytes",
    Category.OPTIMIZER_STATE.value: "state_bytes",
    Category.ACTIVATION.value: "activation_bytes",
}


def modules_json(
    account: MemoryAccount, timed: TimePrediction | None = None
) -> list[dict[str, Any]]:
    """Modules with the memory and time of this rank, those inside them included."""
    recording = account.recording
    sums = {path: Counter[str]() for path in recording.modules}
    last = max(recording.steps - 1, 0)
    for storage, info in recording.storages.items():
        key = _KEYS.get(account.category(storage))
        if key is None:
            continue
        passing = key in ("gradient_bytes", "activation_bytes")
        if passing and (info.site.step != last or info.site.phase is Phase.RECOMPUTE):
            continue
        for module, nbytes in info.bytes_by_module():
            for path in _around(module):
                if path in sums:
                    sums[path][key] += nbytes
    times = _times(timed, sums)
    return [
        {
            "path": path,
            "class": facts.type,
            "parameters": facts.parameters,
            **{key: sums[path][key] for key in _KEYS.values()},
            **times.get(path, {}),
        }
        for path, facts in recording.modules.items()
    ]


def _times(
    timed: TimePrediction | None, paths: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """Operations, seconds, exposed seconds and bytes sent, by module."""
    if timed is None or timed.account is None:
        return {}
    sums: dict[str, dict[str, Any]] = {
        path: {"flops": 0, "seconds": 0.0, "exposed_seconds": 0.0, "bytes_by_axis": {}}
        for path in paths
    }
    account = timed.account
    for key, figures in (
        ("flops", timed.module_flops()),
        ("seconds", account.modules),
        ("exposed_seconds", account.module_waits),
    ):
        for module, figure in figures.items():
            for path in _around(module):
                if path in sums:
                    sums[path][key] += figure
    last = max(timed.recording.steps - 1, 0)
    for event in timed.recording.events:
        if isinstance(event, Comm) and event.site.step == last:
            axis = event.label
            for path in _around(event.site.module):
                if path in sums:
                    by_axis = sums[path]["bytes_by_axis"]
                    by_axis[axis] = by_axis.get(axis, 0) + event.payload_bytes
    return sums


def _around(path: str) -> list[str]:
    """``a.b.c``, ``a.b`` and ``a``."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def mesh_json(recording: Recording) -> dict[str, Any]:
    """Axes of the meshes, and the groups that communicated with what they sent."""
    payload, wire, count = Counter[str](), Counter[str](), Counter[str]()
    axes: dict[str, str | None] = {}
    last = max(recording.steps - 1, 0)
    for event in recording.events:
        if isinstance(event, Comm) and event.site.step == last:
            payload[event.group] += event.payload_bytes
            wire[event.group] += wire_bytes(
                Kind(event.kind), event.payload_bytes, len(event.ranks)
            )
            count[event.group] += 1
        if isinstance(event, Comm):
            axes[event.group] = event.axis
    return {
        "axes": [{"name": name, "size": size} for name, size in recording.axes.items()],
        "groups": [
            {
                "name": name,
                "axis": axes.get(name),
                "ranks": list(ranks),
                "payload_bytes": payload[name],
                "wire_bytes": wire[name],
                "count": count[name],
            }
            for name, ranks in recording.groups.items()
        ],
    }
