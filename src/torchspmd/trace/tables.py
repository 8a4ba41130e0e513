"""What a CommDebugMode saw, as text and as JSON: pure functions of its data."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from torchspmd.comm import GLOBAL, CommEvent, Kind, Ledger, Phase, Total, is_within
from torchspmd.comm.tree import ModuleNode, build_tree
from torchspmd.errors import UsageError
from torchspmd.trace.modules import LOST, ModuleInfo
from torchspmd.trace.operations import TRIVIAL, Operation, OperationLog


class Detail(IntEnum):
    """How much a table tells; the numbers are upstream's noise levels."""

    COUNTS = 0
    DTENSORS = 1
    OPERATIONS = 2
    EVERYTHING = 3

    @classmethod
    def of(cls, noise_level: int, *, are_recorded: bool) -> "Detail":
        """The level for a number; refused where it asks for what was not recorded."""
        if isinstance(noise_level, bool) or noise_level not in list(cls):
            raise UsageError(
                f"noise_level={noise_level!r}: choose 0 (counts), 1 (module types, "
                "parameters, operators on DTensors), 2 (other operators) or 3 (all)."
            )
        if noise_level >= cls.OPERATIONS and not are_recorded:
            raise UsageError(
                f"noise_level={noise_level} lists operators, and they were not recorded. "
                "Make the mode with CommDebugMode(operations=True), or ask for "
                "noise_level=0 (counts) or 1 (also module types and parameters)."
            )
        return cls(noise_level)


@dataclass(frozen=True, slots=True)
class Traced:
    """Everything a table can show. ``operations`` is None when they were not recorded."""

    ledger: Ledger
    modules: Mapping[str, ModuleInfo]
    operations: OperationLog | None

    def tree(self) -> ModuleNode:
        """A row for every module that ran or communicated."""
        return build_tree(self.ledger, self.modules)

    def operations_of(self, path: str, phase: Phase, detail: Detail) -> list[Operation]:
        """The operators of a module in a phase, as far as a table of that detail goes."""
        if self.operations is None or detail is Detail.COUNTS:
            return []
        return [
            operation
            for operation in self.operations.of(path, phase)
            if (detail >= Detail.OPERATIONS or operation.on_dtensors)
            and (detail >= Detail.EVERYTHING or operation.name not in TRIVIAL)
        ]

    def note_lines(self, detail: Detail) -> list[str]:
        """What a reader of the table must know."""
        lines = self.ledger.note_lines()
        if detail > Detail.COUNTS and self.operations is None:
            lines.append(
                "Note: Operators were not recorded: make the mode with "
                "CommDebugMode(operations=True)."
            )
        if self.operations is not None and self.operations.dropped:
            lines.append(f"Note: {self.operations.dropped} operators were not listed.")
        return lines


def tracing_table(traced: Traced, detail: Detail) -> str:
    """Every module with its communication by phase and operator, indented by depth."""
    lines = []
    for depth, node in traced.tree().walk():
        indent = "  " * depth
        lines.append(f"{indent}{node.path}")
        module = traced.modules.get(node.path)
        if module is not None and detail > Detail.COUNTS:
            lines += _module_lines(module, indent)
        for phase in Phase:
            lines += _phase_lines(traced, node, phase, f"{indent}  ", detail)
    return "\n".join([*lines, *traced.note_lines(detail)]) + "\n"


def _module_lines(module: ModuleInfo, indent: str) -> list[str]:
    lines = [f"{indent}*module type: {module.type_name}"]
    parameters, placements = module.parameters, module.placements
    if parameters:
        lines.append(f"{indent}*Parameter List")
        lines += [
            f"{indent} *{name}: {placements.get(name, 'not a DTensor')}"
            for name in parameters
        ]
    return lines


def _phase_lines(
    traced: Traced, node: ModuleNode, phase: Phase, indent: str, detail: Detail
) -> list[str]:
    own = node.own.total_by("op", phase=phase)
    lines = [
        f"{indent}*{op[0]}: {total.count} (own {own.get(op, Total()).count}), "
        f"{total.payload_bytes} bytes"
        for op, total in node.total.total_by("op", phase=phase).items()
    ]
    lines += [
        f"{indent}  **{_operation_text(operation)}"
        for operation in traced.operations_of(node.path, phase, detail)
    ]
    return [f"{indent}{phase.value.upper()} PASS", *lines] if lines else []


def _operation_text(operation: Operation) -> str:
    if not operation.on_dtensors:
        return operation.name
    shapes = ", ".join(str(list(shape)) for shape in operation.shapes)
    return f"{operation.name} shapes: {shapes} layouts: {', '.join(operation.layouts)}"


def tracing_json(traced: Traced, detail: Detail) -> str:
    """The module tree with counts and operators, and the notes, as JSON text."""
    root = _json_node(traced, traced.tree(), detail)
    return json.dumps({**root, "notes": traced.note_lines(detail)}, indent=1)


def _json_node(traced: Traced, node: ModuleNode, detail: Detail) -> dict[str, Any]:
    data: dict[str, Any] = {"fqn": node.path, "module_type": "", "parameters": []}
    module = traced.modules.get(node.path)
    if module is not None and detail > Detail.COUNTS:
        data["module_type"] = module.type_name
        data["parameters"] = [
            (name, str(module.placements.get(name, ""))) for name in module.parameters
        ]
    data["children"] = [_json_node(traced, child, detail) for child in node.children]
    for phase in Phase:
        suffix = "checkpointing" if phase is Phase.RECOMPUTE else phase.value
        data[f"collectives_{suffix}"] = [
            (op[0], total.count)
            for op, total in node.total.total_by("op", phase=phase).items()
        ]
        data[f"operations_{suffix}"] = [
            {
                "name": operation.name,
                "input_shape": [str(list(shape)) for shape in operation.shapes],
                "input_sharding": list(operation.layouts),
                "device_mesh": operation.mesh,
            }
            for operation in traced.operations_of(node.path, phase, detail)
        ]
    return data


def parameter_table(modules: Mapping[str, ModuleInfo]) -> str:
    """One line for each parameter: shape, dtype, layout."""
    lines = []
    for path, module in modules.items():
        placements = module.placements
        for name, value in module.parameters.items():
            layout = placements.get(name, "not a DTensor")
            shape = list(value.shape)
            lines.append(f"{path}.{name}: {shape} {value.dtype} {layout}\n")
    return "".join(lines)


# ----------------------------------------------------------------------------
# Counts in the shapes that users of CommDebugMode read them in.


class ModuleCounts(dict[str, "defaultdict[Any, int]"]):
    """Counts of one module by phase; an operator packet as key gives all phases.

    Forward and backward are always there, recompute and optimizer when they happened.
    """

    def __init__(self) -> None:
        super().__init__(forward=defaultdict(int), backward=defaultdict(int))

    def add(self, phase: str, packet: Any, count: int) -> None:
        """Count some more."""
        self.setdefault(phase, defaultdict(int))[packet] += count

    def __missing__(self, packet: Any) -> Any:
        if isinstance(packet, str):
            raise KeyError(packet)
        return sum(counts.get(packet, 0) for counts in self.values())


def packet(name: str) -> Any:
    """``torch.ops.<namespace>.<name>``, or the native one where torch has no other."""
    namespace, _, base = name.partition(".")
    found = getattr(getattr(torch.ops, namespace), base, None)
    return found or getattr(torch.ops._c10d_functional, base)


def count_packets(ledger: Ledger, *, checks: bool) -> dict[Any, int]:
    """Counts by operator packet."""
    counts: dict[Any, int] = defaultdict(int)
    for key, total in ledger.rows.items():
        if checks or not key.check:
            counts[packet(key.op)] += total.count
    return counts


def count_modules(
    ledger: Ledger, modules: Mapping[str, object]
) -> dict[str, ModuleCounts]:
    """Counts by module path: each module that communicated, and those around it."""
    counts: dict[str, ModuleCounts] = {}
    for key, total in ledger.rows.items():
        around = [path for path in modules if is_within(key.module, path)]
        for path in {GLOBAL: None, **dict.fromkeys(around), key.module: None}:
            module_counts = counts.setdefault(path, ModuleCounts())
            module_counts.add(key.phase.value, packet(key.op), total.count)
    return counts


# ----------------------------------------------------------------------------
# What a reader of a ledger must know and could not see in the numbers.

ON_REPLAY = (
    "a CUDA graph was replayed: what it communicates cannot be seen; record the run that "
    "captures it"
)
ON_FIRST_DDP_STEP = (
    "this is the first step of DistributedDataParallel, which groups gradients into other "
    "buckets from the second step on: record a later step for what training repeats"
)
_ON_COMPILED = (
    "communication inside a region compiled by torch.compile is attributed to the module "
    "that was called, not to those inside it"
)
_ON_LOST = (
    "backward ran for modules whose forward was too many calls ago to know their names; "
    f"they are shown as {LOST}"
)


def on_event(event: CommEvent) -> Sequence[str]:
    """What to say about one communication; most often nothing."""
    if not event.compiled and event.kind is not Kind.UNKNOWN and event.module != LOST:
        return ()
    said = []
    if event.kind is Kind.UNKNOWN:
        said.append(
            f"{event.op} is an operator that torchspmd does not know: it is counted as "
            "unknown and its wire bytes as 0"
        )
    if event.compiled:
        said.append(_ON_COMPILED)
    if event.module == LOST:
        said.append(_ON_LOST)
    return said


def on_compiled_modules(paths: Iterable[str]) -> str:
    """What to say when operators were asked for and some ran compiled."""
    return (
        "operators inside regions compiled by torch.compile are not listed one by one: "
        + ", ".join(sorted(paths))
    )
