"""``Plan.preview``: what a plan does to a model, as a value, before it is done."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from torchspmd.comm import Ledger
from torchspmd.errors import UsageError
from torchspmd.parallel.plan import Style
from torchspmd.parallel.plan_calls import Inputs
from torchspmd.parallel.plan_forecast import forecast
from torchspmd.parallel.plan_mesh import MeshLike, PlanMesh, describe_mesh_axis
from torchspmd.parallel.plan_rows import ParameterRow, build_rows, uneven_notes
from torchspmd.parallel.resolve import resolve


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Preview:
    """What a plan does to a model; ``print`` it, or read its rows.

    Attributes:
        model: The model's class.
        mesh: The mesh and the axis of the plan.
        rows: Every parameter, layers folded.
        ledger: The expected communication of one forward and backward of one rank;
            None where no input shape was given.
        notes: What the reader must know: assumptions, uneven shards, what is unknown.
    """

    model: str
    mesh: PlanMesh
    rows: tuple[ParameterRow, ...]
    ledger: Ledger | None
    notes: tuple[str, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all parameters on one device."""
        return sum(row.total_bytes for row in self.rows)

    @property
    def replicated_bytes(self) -> int:
        """Bytes of the parameters that every rank of the axis holds whole."""
        return sum(row.total_bytes for row in self.rows if row.is_replicated)

    def bytes_on_rank(self, rank: int) -> int:
        """Bytes of parameters that one rank of the axis holds."""
        if not 0 <= rank < self.mesh.size:
            raise UsageError(
                f"bytes_on_rank({rank}): the ranks of {self.mesh.axis} are 0 to "
                f"{self.mesh.size - 1}."
            )
        return sum(
            row.local_bytes[rank if len(row.local_bytes) > 1 else 0]
            for row in self.rows
        )

    def to_json(self) -> str:
        """All of it as JSON, sizes in bytes."""
        value: dict[str, Any] = {
            "model": self.model,
            "mesh": dict(self.mesh.axes),
            "axis": self.mesh.axis,
            "total_bytes": self.total_bytes,
            "replicated_bytes": self.replicated_bytes,
            "bytes_on_rank_0": self.bytes_on_rank(0),
            "parameters": [asdict(row) for row in self.rows],
            "communication": None,
            "notes": self.notes,
        }
        if self.ledger is not None:
            totals = self.ledger.total_by("phase", "kind", "module")
            value["communication"] = [
                {"phase": phase, "kind": kind, "module": module, **asdict(total)}
                for (phase, kind, module), total in totals.items()
            ]
        return json.dumps(value, indent=1)

    def __str__(self) -> str:
        from torchspmd.parallel.plan_table import format_preview

        return format_preview(self)


def build_preview(
    plan: Style | Mapping[str, Style],
    model: nn.Module,
    mesh: MeshLike,
    *,
    axis: str | None = None,
    tokens: tuple[int | None, int | None] = (None, None),
    example_inputs: Inputs | None = None,
) -> Preview:
    """See ``Plan.preview``."""
    mesh_axis = describe_mesh_axis(mesh, axis)
    resolved = resolve(plan, model, mesh_axis, call="Plan.preview")
    rows = build_rows(model, resolved.assignments, resolved.mesh.size)
    notes = uneven_notes(rows)
    ledger = None
    if example_inputs is not None or tokens != (None, None):
        ledger, more = forecast(model, resolved, example_inputs, _tokens(*tokens))
        notes += more
    return Preview(
        model=type(model).__name__,
        mesh=resolved.mesh,
        rows=rows,
        ledger=ledger,
        notes=tuple(notes),
    )


def _tokens(batch: int | None, seq: int | None) -> tuple[int, int]:
    for name, value in (("batch", batch), ("seq", seq)):
        if value is not None and (type(value) is not int or value < 1):
            raise UsageError(
                f"preview: {name} is {value!r}; pass a number of at least 1."
            )
    return batch or 1, seq or 1
