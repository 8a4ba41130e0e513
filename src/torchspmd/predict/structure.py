"""The modules and the mesh of a prediction file, from a recording."""

from collections import Counter
from typing import Any

from torchspmd.predict.memory import MemoryAccount
from torchspmd.rehearse.recording import Category, Comm, Phase, Recording

__all__ = ["mesh_json", "modules_json"]

_KEYS = {
    Category.PARAMETER.value: "parameter_bytes",
    Category.GRADIENT.value: "gradient_bytes",
    Category.OPTIMIZER_STATE.value: "state_bytes",
    Category.ACTIVATION.value: "activation_bytes",
}


def modules_json(account: MemoryAccount) -> list[dict[str, Any]]:
    """Modules with the memory of this rank, those inside them included."""
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
        for path in _around(info.module or info.site.module):
            if path in sums:
                sums[path][key] += info.nbytes
    return [
        {
            "path": path,
            "class": facts.type,
            "parameters": facts.parameters,
            **{key: sums[path][key] for key in _KEYS.values()},
        }
        for path, facts in recording.modules.items()
    ]


def _around(path: str) -> list[str]:
    """``a.b.c``, ``a.b`` and ``a``."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), 0, -1)]


def mesh_json(recording: Recording) -> dict[str, Any]:
    """Axes of the meshes, and the groups that communicated with what they sent."""
    payload, count = Counter[str](), Counter[str]()
    axes: dict[str, str | None] = {}
    last = max(recording.steps - 1, 0)
    for event in recording.events:
        if isinstance(event, Comm) and event.site.step == last:
            payload[event.group] += event.payload_bytes
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
                "count": count[name],
            }
            for name, ranks in recording.groups.items()
        ],
    }
