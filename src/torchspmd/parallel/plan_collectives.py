"""The communication of a plan, from the layouts of its styles and the calls of a model.

What ``exchange.move`` does with tensors, this does with shapes; both follow one table:

| from      | to          | sends                                      |
|-----------|-------------|--------------------------------------------|
| Partial   | Replicate   | all_reduce of the whole tensor             |
| Partial   | Shard(d)    | reduce_scatter of the whole, d padded      |
| Shard(d)  | Replicate   | all_gather to the whole, d padded          |
| Shard(d)  | Shard(e)    | all_to_all of one rank's shard, e padded   |
| Replicate | anything    | nothing                                    |
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchspmd.comm import CommEvent, Group, Kind, wire_bytes
from torchspmd.parallel.axis import positive_dim
from torchspmd.parallel.plan_assignment import Assignment
from torchspmd.parallel.plan_calls import Call
from torchspmd.parallel.plan_mesh import PlanMesh
from torchspmd.parallel.plan_moves import Handed, Move, moves_of

_OPS = {
    Kind.ALL_REDUCE: "c10d_functional.all_reduce",
    Kind.ALL_GATHER: "c10d_functional.all_gather_into_tensor",
    Kind.REDUCE_SCATTER: "c10d_functional.reduce_scatter_tensor",
    Kind.ALL_TO_ALL: "c10d_functional.all_to_all_single",
}


class Prediction(NamedTuple):
    """What a plan will send, and what could not be told."""

    events: list[CommEvent]
    unknown: list[str]


def predict_collectives(
    assignments: Sequence[Assignment],
    calls: Sequence[Call],
    mesh: PlanMesh,
    model_name: str,
) -> Prediction:
    """Every collective of one forward and backward of the calls."""
    by_path = {assignment.path: assignment for assignment in assignments}
    group = Group(name="predicted", ranks=tuple(range(mesh.size)), axis=mesh.axis)
    handed = _follow_dtensors(by_path, calls, mesh.size)
    prediction = Prediction([], [])
    for call in calls:
        assignment = by_path[call.path]
        module = f"{model_name}.{call.path}" if call.path else model_name
        moves = moves_of(assignment, call, handed, mesh.size)
        if moves is None:
            prediction.unknown.append(call.path)
            continue
        for move in moves:
            event = _event(move, group, module)
            if event is not None:
                prediction.events.append(event)
    return prediction


def _follow_dtensors(
    by_path: Mapping[str, Assignment], calls: Sequence[Call], num_ranks: int
) -> Handed:
    """Which sums are left to the module that made a DTensor.

    It is read after it is made, so this takes a walk over the calls of its own.
    """
    first = Handed()
    for call in calls:
        moves_of(by_path[call.path], call, first, num_ranks)
    return Handed(in_terms=first.in_terms)


def _event(move: Move, group: Group, module: str) -> CommEvent | None:
    source = positive_dim(move.source, len(move.shape))
    target = positive_dim(move.target, len(move.shape))
    kind = _kind(source, target)
    if kind is None:
        return None
    shape = _buffer_shape(source, target, move.shape, group.size)
    payload = math.prod(shape) * move.dtype.itemsize
    return CommEvent(
        kind=kind,
        op=_OPS[kind],
        dtype=str(move.dtype).removeprefix("torch."),
        shape=shape,
        payload_bytes=payload,
        wire_bytes=wire_bytes(kind, payload, group.size),
        group=group,
        phase=move.phase,
        module=module,
    )


def _kind(source: Placement, target: Placement) -> Kind | None:
    if source == target or isinstance(source, Replicate):
        return None
    if isinstance(source, Partial):
        if isinstance(target, Shard):
            return Kind.REDUCE_SCATTER
        return Kind.ALL_REDUCE if isinstance(target, Replicate) else None
    return Kind.ALL_TO_ALL if isinstance(target, Shard) else Kind.ALL_GATHER


def _buffer_shape(
    source: Placement, target: Placement, shape: tuple[int, ...], size: int
) -> tuple[int, ...]:
    """The whole logical buffer: sharded dimensions padded to equal shards."""
    padded = list(shape)
    for placement in (source, target):
        if isinstance(placement, Shard):
            padded[placement.dim] = -(-shape[placement.dim] // size) * size
    if isinstance(source, Shard) and isinstance(target, Shard):
        padded[source.dim] //= size  # an all-to-all hands over one rank's shard
    return tuple(padded)
