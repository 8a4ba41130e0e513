"""Made-up predictions that hold together: what a slice says is in every sum.

A Llama under FSDP and tensor parallelism is played through a small model of streams: the
host issues, the device computes, three communicators send. Every figure of the document is
added up from the same slices, modules and allocations, as it is in a real one.
"""

from collections import Counter, defaultdict
from typing import Any

from torchspmd.comm import CommEvent, Group, Kind, Ledger, Phase, ledger_to_dict

HOSTILE = "<script>alert(1)</script>"
_LANES = [
    ("host", "host"),
    ("compute", "compute"),
    ("tp", "communicator"),
    ("fsdp gather", "communicator"),
    ("fsdp reduce", "communicator"),
    ("copy", "copy"),
]
_COLUMNS = (
    "lane", "start", "duration", "name", "module", "phase", "detail", "bytes", "flops",
    "waits_for", "exposed",
)  # fmt: skip
# Of one layer: name of the child, operator, shape on this rank, columns of the weight.
_LINEARS = [
    ("self_attn.q_proj", 4096, 512),
    ("self_attn.k_proj", 4096, 128),
    ("self_attn.v_proj", 4096, 128),
    ("self_attn.o_proj", 512, 4096),
    ("mlp.gate_proj", 4096, 1792),
    ("mlp.up_proj", 4096, 1792),
    ("mlp.down_proj", 1792, 4096),
]
_CLASSES = {"self_attn": "LlamaAttention", "mlp": "LlamaMLP"}
_RATE = 6.0e14  # floating-point operations a second
_TP, _DP, _NODE = 8, 8, 8
_TOKENS = 8192
_GROUPS = {
    "tp": Group("mesh_tp", tuple(range(_TP)), "tp"),
    "dp": Group("mesh_dp", tuple(range(0, _TP * _DP, _TP)), "dp"),
}


class _Player:
    """Streams, slices and sums."""

    def __init__(self) -> None:
        self.strings: dict[str, int] = {}
        self.rows: list[tuple[Any, ...]] = []
        self.free = [0.0] * len(_LANES)
        self.seconds: Counter[str] = Counter()
        self.waited: Counter[str] = Counter()
        self.flops: Counter[str] = Counter()
        self.ledger = Ledger(max_events=0)
        self.exposed = defaultdict(lambda: [0.0, 0, 0])

    def text(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings))

    def slice(
        self,
        lane: int,
        start: float,
        duration: float,
        words: tuple[str, str, str, str],
        numbers: tuple[int, int, int, int] = (0, 0, -1, 0),
    ) -> int:
        """One slice: name, module, phase, detail; bytes, flops, waits_for, exposed."""
        places = [self.text(word) for word in words]
        self.rows.append((lane, round(start, 3), round(duration, 3), *places, *numbers))
        self.free[lane] = max(self.free[lane], start + duration)
        return len(self.rows) - 1

    def op(self, name: str, module: str, phase: str, us: float, flops: int = 0) -> None:
        """The host issues an operator, the device runs it."""
        issue = 5.0 + len(name) % 4
        self.slice(0, self.free[0], issue, (name, module, phase, ""))
        start = max(self.free[0], self.free[1])
        idle = start - self.free[1]
        if idle > 0.5 and self.free[1]:
            words = ("wait for the host", module, phase, "")
            self.slice(1, self.free[1], idle, words, (0, 0, -1, 2))
        detail = f"bf16[{_TOKENS}, 4096]"
        self.slice(1, start, us, (name, module, phase, detail), (0, flops, -1, 0))
        self.seconds[module] += us * 1e-6
        self.flops[module] += flops

    def send(
        self, lane: int, kind: str, axis: str, module: str, phase: str, nbytes: int
    ) -> int:
        # Its input is made by what the device did so far; memory holds two layers.
        start = max(self.free[lane], self.free[0], self.free[1])
        us = 12.0 + nbytes / (2.6e5 if axis == "tp" else 4.2e4)
        ranks = _TP if axis == "tp" else _DP
        wire = nbytes * (ranks - 1) // ranks * (2 if kind == "all_reduce" else 1)
        event = CommEvent(
            Kind(kind), f"c10d_functional.{kind}", "bfloat16", (nbytes // 2,), nbytes, wire,
            _GROUPS[axis], Phase(phase), module,
        )  # fmt: skip
        self.ledger.append(event)
        words = (kind, module, phase, f"bf16 over {axis}, {ranks} ranks")
        return self.slice(lane, start, us, words, (nbytes, 0, -1, 0))

    def wait(self, sent: int, module: str, phase: str) -> None:
        """The device waits until a collective ends."""
        lane, start, duration, name, *_ = self.rows[sent]
        left = start + duration - self.free[1]
        if left <= 0:
            return
        kind = next(text for text, place in self.strings.items() if place == name)
        axis = "tp" if lane == 2 else "dp"
        nbytes = self.rows[sent][7]
        words = (f"wait for {kind}", module, phase, "")
        self.slice(1, self.free[1], left, words, (nbytes, 0, sent, 1))
        self.waited[module] += left * 1e-6
        entry = self.exposed[axis, kind, module]
        entry[0] += left * 1e-6
        entry[1] += nbytes
        entry[2] += 1

    def columns(self) -> dict[str, list[Any]]:
        return {
            name: [row[place] for row in self.rows]
            for place, name in enumerate(_COLUMNS)
        }


def prediction(
    layers: int = 32,
    micro_batches: int = 1,
    glue: int = 8,
    fits: str = "yes",
    hostile: bool = False,
) -> dict[str, Any]:
    """The document of one rank.

    Args:
        layers: Of the Llama.
        micro_batches: Forward and backward passes in the step.
        glue: Small operators around each linear; more make more slices.
        fits: The verdict; ``no`` comes with a first failure.
        hostile: One module, one operator and the script are called like HTML.
    """
    player, phases = _Player(), []
    extra = [HOSTILE] if hostile else []
    names = [f"Llama.model.layers.{n}" for n in range(layers)] + [
        f"Llama.{name}" for name in extra
    ]
    for _ in range(micro_batches):
        begin = player.free[1]
        _pass(player, names, "forward", glue)
        phases.append(_phase("forward", begin, player.free[1]))
        begin = player.free[1]
        _pass(player, names[::-1], "backward", glue)
        phases.append(_phase("backward", begin, player.free[1]))
    begin = player.free[1]
    player.op("fused_adamw", "Global", "optimizer", 1800.0)
    phases.append(_phase("optimizer", begin, player.free[1]))
    player.slice(5, player.free[1], 40.0, ("copy to host", "Global", "optimizer", ""))
    if hostile:
        player.op(f"op</script>{HOSTILE}", names[-1], "optimizer", 10.0)
    modules = _modules(player, names)
    return _document(player, phases, modules, layers=layers, fits=fits, hostile=hostile)


def search(candidates: int = 24, layers: int = 4) -> dict[str, Any]:
    """A search over layouts; larger tensor parallel groups are slower and smaller."""
    found: list[dict[str, Any]] = []
    for place in range(candidates):
        tp, batch = 2 ** (place % 4), 1 + place // 4
        peak = int((30 + 14 * batch + 40 / tp) * 2**30)
        fits = "no" if peak > 79 * 2**30 else "at risk" if peak > 75 * 2**30 else "yes"
        one = {**prediction(layers=layers, fits=fits), "timeline": None}
        seconds = 0.1 + 0.4 * batch + 0.05 * tp + 0.013 * (place % 5)
        one["step_seconds"] = seconds
        values = {"tp": tp, "dp": 64 // tp, "batch": batch, "ac": "none"}
        found.append(
            {
                "values": values,
                "arguments": [f"--{name}={value}" for name, value in values.items()],
                "fits": fits,
                "step_seconds": seconds,
                "mfu": round(0.2 * batch / seconds, 4),
                "exposed_seconds": round(0.02 * tp, 4),
                "work_per_second": 8192 * batch / seconds,
                "device_peak_bytes": peak,
                "problem": None,
                "prediction": one,
            }
        )
    for each in found:
        each["pareto"] = each["fits"] != "no" and not any(
            other["fits"] != "no"
            and other["work_per_second"] >= each["work_per_second"]
            and other["device_peak_bytes"] <= each["device_peak_bytes"]
            for other in found
            if other is not each
        )
    fitting = [each for each in found if each["fits"] == "yes"]
    best = max(fitting, key=lambda each: each["work_per_second"], default=None)
    failed = {
        "values": {"tp": 64, "dp": 1, "batch": 1, "ac": "none"},
        "arguments": ["--tp=64"],
        "fits": None,
        "step_seconds": None,
        "work_per_second": None,
        "device_peak_bytes": None,
        "pareto": False,
        "problem": "8 key-value heads cannot be split over 64 ranks",
    }
    return {
        "format": "torchspmd/search",
        "version": 1,
        "command": "torchspmd search train.py --world-size 64 --gpu h100",
        "script": "train.py",
        "world_size": 64,
        "gpu": "h100",
        "device_bytes": 80 * 2**30,
        "unit": "item",
        "best": best and best["values"],
        "candidates": [*found, failed],
        "notes": ["Sequence length 8192 in every candidate."],
    }


def _phase(name: str, begin: float, end: float) -> dict[str, Any]:
    duration = round(end - begin, 3)
    return {"name": name, "start": round(begin, 3), "duration": duration}


def _pass(player: _Player, names: list[str], phase: str, glue: int) -> None:
    """One direction through all layers, the next one's weights gathered ahead."""
    gathers: dict[str, int] = {}
    factor = 1 if phase == "forward" else 2
    for place, layer in enumerate(names):
        for ahead in names[place : place + 2]:
            if ahead not in gathers:
                nbytes = 54 << 20
                gathers[ahead] = player.send(
                    3, "all_gather", "dp", ahead, phase, nbytes
                )
        player.wait(gathers[layer], layer, phase)
        for child, rows, columns in _LINEARS:
            module = f"{layer}.{child}"
            for number in range(glue):
                name = ("aten.mul", "aten.add", "aten.silu", "aten.view")[number % 4]
                player.op(name, module, phase, 9.0 + 2 * (number % 3))
            flops = 2 * _TOKENS * rows * columns * factor
            player.op("aten.mm", module, phase, flops / _RATE * 1e6, flops)
            if child.endswith(("o_proj", "down_proj")):
                nbytes = _TOKENS * 4096 * 2
                sent = player.send(2, "reduce_scatter", "tp", module, phase, nbytes)
                player.wait(sent, module, phase)
        flops = 4 * _TOKENS * _TOKENS * 64 * factor
        attention = f"{layer}.self_attn"
        player.op("aten.sdpa", attention, phase, flops / _RATE * 1e6, flops)
        if phase == "backward":
            player.send(4, "reduce_scatter", "dp", layer, phase, 108 << 20)


def _modules(player: _Player, names: list[str]) -> list[dict[str, Any]]:
    """Every module, parents first; each with all that is inside it."""
    paths: dict[str, tuple[str, int]] = {}
    for layer in names:
        parts = layer.split(".")
        for end in range(1, len(parts)):
            path = ".".join(parts[:end])
            kind = "ModuleList" if path.endswith("layers") else "LlamaModel"
            paths.setdefault(path, (kind if end > 1 else "LlamaForCausalLM", 0))
        paths[layer] = ("LlamaDecoderLayer", 0)
        for child, rows, columns in _LINEARS:
            parent = child.split(".")[0]
            paths.setdefault(f"{layer}.{parent}", (_CLASSES[parent], 0))
            paths[f"{layer}.{child}"] = ("Linear", rows * columns)
    figures = (
        *("parameters", "parameter_bytes", "gradient_bytes", "state_bytes"),
        *("activation_bytes", "flops", "seconds", "exposed_seconds"),
    )
    sums: dict[str, dict[str, Any]] = {
        path: {"path": path, "class": kind, **dict.fromkeys(figures, 0)}
        for path, (kind, _) in paths.items()
    }
    for path, (_, count) in paths.items():
        for around in _around(path):
            entry = sums[around]
            entry["parameters"] += count
            entry["parameter_bytes"] += count * 4 // _DP
            entry["gradient_bytes"] += count * 4 // _DP
            entry["state_bytes"] += count * 8 // _DP
            entry["activation_bytes"] += (_TOKENS * 2048) if count else 0
            entry["flops"] += player.flops[path]
            entry["seconds"] += player.seconds[path]
            entry["exposed_seconds"] += player.waited[path]
    for path, entry in sums.items():
        sent = {axis: player.ledger.total(axis=axis, module=path) for axis in _GROUPS}
        entry["bytes_by_axis"] = {
            axis: total.wire_bytes for axis, total in sent.items() if total.count
        }
    return list(sums.values())


def _around(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def _curve(root: dict[str, Any], layers: int) -> tuple[dict[str, Any], int]:
    """Initialisation, a first and a steady step: activations rise and fall."""
    held = {
        "parameter": root["parameter_bytes"],
        "gradient": root["gradient_bytes"],
        "optimizer state": root["state_bytes"],
        "activation": root["activation_bytes"],
    }
    points: list[dict[str, int]] = []
    marks = []
    now = dict.fromkeys([*held, "temporary"], 0)

    def point(**changes: int) -> None:
        now.update({name.replace("_", " "): value for name, value in changes.items()})
        points.append(dict(now))

    for layer in range(layers):
        point(parameter=held["parameter"] * (layer + 1) // layers)
    marks.append({"point": len(points) - 1, "name": "initialisation ends"})
    for step in range(2):
        marks.append({"point": len(points), "name": f"step {step} begins"})
        for layer in range(layers):
            point(activation=held["activation"] * (layer + 1) // layers)
            point(temporary=(64 << 20) * (layer % 3))
        for layer in reversed(range(layers)):
            point(
                activation=held["activation"] * layer // layers,
                gradient=held["gradient"] * (layers - layer) // layers,
                temporary=(96 << 20) * (layer % 2),
            )
        point(optimizer_state=held["optimizer state"], temporary=0)
        point(gradient=0)
        marks.append({"point": len(points) - 1, "name": f"step {step} ends"})
    allocated = [sum(each.values()) for each in points]
    reserved, most = [], 0
    for value in allocated:
        most = max(most, int(value * 1.04) + (40 << 20))
        reserved.append(most)
    peak = max(range(len(points)), key=allocated.__getitem__)
    curve = {
        "event": [7 * place for place in range(len(points))],
        "seconds": None,
        "allocated": allocated,
        "reserved": reserved,
        "categories": {name: [each[name] for each in points] for name in now},
        "holders": [{"point": peak, "holders": _holders(points[peak])}],
        "marks": marks,
    }
    return curve, peak


def _holders(point: dict[str, int]) -> list[dict[str, Any]]:
    return [
        {
            "nbytes": nbytes // 2,
            "storages": 12,
            "category": category,
            "module": f"Llama.model.layers.{part}",
            "line": f"model.py:{100 + part} forward",
            "name": "",
        }
        for category, nbytes in point.items()
        for part in range(2)
        if nbytes
    ]


def _memory(root: dict[str, Any], layers: int, fits: str) -> dict[str, Any]:
    curve, peak = _curve(root, layers)
    outside = 1_400 << 20
    allocated, reserved = curve["allocated"][peak], max(curve["reserved"])
    in_use = reserved + outside
    device = {
        "yes": in_use + (9 << 30),
        "at risk": in_use + (1 << 30),
        "no": in_use * 7 // 8,
    }[fits]
    at = {
        "module": "Llama.model.layers.1",
        "phase": "backward",
        "step": 1,
        "line": "train.py:41",
    }
    failure = {"bytes": 96 << 20, "allocated_bytes": allocated, "operator": "aten.mm"}
    by_category = {name: column[peak] for name, column in curve["categories"].items()}
    return {
        "allocated_peak_bytes": allocated,
        "reserved_peak_bytes": reserved,
        "steady_bytes": curve["allocated"][-1],
        "peak_phase": "steady step",
        "peak_at": at,
        "by_category": by_category,
        "holders": curve["holders"][0]["holders"],
        "periods": {
            "initialisation": {
                "allocated_peak_bytes": max(curve["allocated"][:layers]),
                "reserved_peak_bytes": max(curve["reserved"][:layers]),
                "by_category": {},
                "at": at,
            },
            "steady step": {
                "allocated_peak_bytes": allocated,
                "reserved_peak_bytes": reserved,
                "by_category": by_category,
                "at": at,
            },
        },
        "device_bytes": device,
        "device_peak_bytes": in_use,
        "margin_bytes": device - in_use,
        "fragmentation": 0.0412,
        "cache_flushes": 0,
        "fixed": [
            {"name": "CUDA context", "bytes": 480 << 20, "source": "h100.toml"},
            {
                "name": "NCCL, 3 communicators",
                "bytes": 920 << 20,
                "source": "h100.toml",
            },
        ],
        "first_failure": {**failure, **at} if fits == "no" else None,
        "curve": curve,
    }


def _groups(ledger: Ledger) -> list[dict[str, Any]]:
    return [
        {
            "name": group.name,
            "axis": axis,
            "ranks": list(group.ranks),
            "payload_bytes": ledger.total(axis=axis).payload_bytes,
            "wire_bytes": ledger.total(axis=axis).wire_bytes,
            "count": ledger.total(axis=axis).count,
        }
        for axis, group in _GROUPS.items()
    ]


def _document(
    player: _Player,
    phases: list[dict[str, Any]],
    modules: list[dict[str, Any]],
    *,
    layers: int,
    fits: str,
    hostile: bool,
) -> dict[str, Any]:
    columns = player.columns()
    exposed = [
        {
            "axis": axis,
            "kind": kind,
            "module": module,
            "seconds": seconds,
            "bytes": nbytes,
            "count": count,
            "cause": "the next operator needs it at once"
            if axis == "tp"
            else "it was started too late to be hidden",
        }
        for (axis, kind, module), (seconds, nbytes, count) in player.exposed.items()
    ]
    exposed.sort(key=lambda entry: -entry["seconds"])
    flops = sum(columns["flops"])
    step = max(player.free) * 1e-6
    script = f"train{HOSTILE if hostile else ''}.py"
    return {
        "format": "torchspmd/prediction",
        "version": 1,
        "command": f"torchspmd predict {script} --world-size 64 --gpu h100",
        "script": script,
        "world_size": _TP * _DP,
        "rank": 0,
        "gpus_per_node": _NODE,
        "gpu": "h100",
        "network": "ib-ndr400",
        "steps": 2,
        "fits": fits,
        "memory": _memory(modules[0], layers, fits),
        "step_seconds": step,
        "compute_seconds": sum(player.seconds.values()),
        "communication_seconds": _busy(columns, {2, 3, 4}),
        "exposed_seconds": sum(entry["seconds"] for entry in exposed),
        "host_seconds": sum(
            duration
            for duration, kind in zip(
                columns["duration"], columns["exposed"], strict=True
            )
            if kind == 2
        )
        * 1e-6,
        "bubble_seconds": 0.0,
        "optimizer_seconds": player.seconds["Global"],
        "step_error": 0.08,
        "step_error_source": "docs/predict.md, one node",
        "model_flops": flops,
        "mfu": flops / step / 989e12,
        "exposed": exposed,
        "suggestions": [
            {
                "what": "gather two layers ahead",
                "gain_seconds": step * 0.04,
                "module": "Llama.model.layers.0",
            },
            {
                "what": "checkpoint the decoder layers",
                "gain_bytes": modules[0]["activation_bytes"] // 2,
                "module": "Llama.model.layers",
            },
        ],
        "modules": modules,
        "timeline": {
            "lanes": [{"name": name, "kind": kind} for name, kind in _LANES],
            "strings": list(player.strings),
            **columns,
            "phases": phases,
        },
        "mesh": {
            "axes": [{"name": "dp", "size": _DP}, {"name": "tp", "size": _TP}],
            "groups": _groups(player.ledger),
        },
        "ledger": ledger_to_dict(player.ledger),
        "assumptions": [
            {
                "what": "bf16 matrix products",
                "value": "610 TFLOP/s",
                "source": "h100.toml, measured",
                "error": 0.06,
            },
            {
                "what": "all_gather over 8 nodes, 54 MiB",
                "value": "42 GB/s",
                "source": "ib-ndr400.toml, published",
                "error": 0.15,
            },
            {
                "what": "no stragglers",
                "value": None,
                "source": "assumed",
                "error": None,
            },
        ],
        "notes": ["The loss was taken as a constant where the script printed it."],
        "skipped": ["Writing a checkpoint: the rehearsal does not write files."],
    }


def _busy(columns: dict[str, list[Any]], lanes: set[int]) -> float:
    return 1e-6 * sum(
        duration
        for lane, duration in zip(columns["lane"], columns["duration"], strict=True)
        if lane in lanes
    )
