"""The communication that a plan will cause, as a ledger that nothing has sent."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchspmd.comm import CommEvent, Group, Kind, Ledger, Phase, wire_bytes
from torchspmd.layout.placements import positive_dim
from torchspmd.layout.shards import full_shard_size
from torchspmd.parallel.axis import PlanMesh, gradient_layout
from torchspmd.parallel.experts import ExpertParallel
from torchspmd.parallel.linear import linear_form
from torchspmd.parallel.plan.assignment import Assignment, fused_form, own_style
from torchspmd.parallel.plan.dry_run import find_fixed_sizes
from torchspmd.parallel.plan.names import fold
from torchspmd.parallel.plan.resolve import Resolved
from torchspmd.parallel.plan.run import (
    Inputs,
    ModuleCall,
    NotRunnableError,
    TensorInfo,
    describe_inputs,
    guess_inputs,
    record,
)
from torchspmd.parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from torchspmd.parallel.sequence import SequenceParallel
from torchspmd.parallel.style import ParallelStyle, StyleLayouts

# ----------------------------------------------------------------------------
# The layout changes that a style makes in one call, forward and backward.


class Move(NamedTuple):
    """A tensor that changes from one layout to another."""

    phase: Phase
    source: Placement
    target: Placement
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class DTensors:
    """The DTensors that modules pass to each other, by identity.

    Attributes:
        layouts: Their layouts.
        partial_gradients: Those whose gradient comes back as partial values, because
            all that read them leave the sum to the module that made the DTensor.
    """

    layouts: dict[int, Placement] = field(default_factory=dict)
    partial_gradients: set[int] = field(default_factory=set)

    def gradient_of(self, info: TensorInfo, layout: Placement) -> Placement:
        """The layout in which the gradient of a tensor with this layout comes back."""
        is_partial = info.identity in self.partial_gradients
        return Partial() if is_partial else gradient_layout(layout)

    def remember(self, info: TensorInfo, layout: Placement, *, local: bool) -> None:
        """A DTensor tells the next module its layout; a plain tensor does not."""
        if local:
            self.layouts.pop(info.identity, None)
        else:
            self.layouts[info.identity] = layout


def moves_of(
    assignment: Assignment, call: ModuleCall, dtensors: DTensors, num_ranks: int
) -> list[Move] | None:
    """The layout changes of one call; None where it is not known.

    Args:
        assignment: The module and its style.
        call: The module's tensors.
        dtensors: The tensors that are DTensors by now; written to.
        num_ranks: How many ranks the axis has.
    """
    style, module = own_style(assignment.style), assignment.module
    if isinstance(style, PrepareModuleInput):
        return list(_input_moves(style, call, dtensors))
    if isinstance(style, PrepareModuleOutput):
        return list(_output_moves(style, call, dtensors))
    if isinstance(style, PrepareModuleInputOutput):
        before = list(_input_moves(style.prepare_module_input, call, dtensors))
        after = list(_output_moves(style.prepare_module_output, call, dtensors))
        return before + after
    layouts = None if style is None else style.layouts(module)
    if style is None or layouts is None:
        return None
    moves = list(_layer_moves(style, layouts, call, dtensors))
    trained = [p for p in module.parameters() if p.requires_grad]
    if isinstance(style, SequenceParallel) and trained:
        if type(module) not in (nn.LayerNorm, nn.RMSNorm):
            return None  # DTensor decides when it sums the gradients
    moves += _parameter_moves(assignment, num_ranks)
    return sorted(moves, key=lambda move: move.phase is Phase.BACKWARD)


def _layer_moves(
    style: ParallelStyle, layouts: StyleLayouts, call: ModuleCall, dtensors: DTensors
) -> Iterator[Move]:
    """Inputs into the layouts that a layer reads, its output into that it returns."""
    made, wanted = layouts.computed, layouts.output
    for info, given, needed in zip(
        call.inputs, layouts.inputs, layouts.desired_inputs, strict=False
    ):
        if info is None or given is None or needed is None:
            continue
        arriving = dtensors.layouts.get(info.identity, given)
        yield from _forward(info, arriving, needed)
        if info.needs_grad:
            # Ranks that compute different things from a whole input have partial
            # values of its gradient.
            is_partial = isinstance(needed, Replicate) and made != Replicate()
            gradient = Partial() if is_partial else needed
            shares_sum = not isinstance(style, ExpertParallel)
            if shares_sum and _leaves_sum(info, gradient, arriving, dtensors):
                dtensors.partial_gradients.add(info.identity)
            else:
                yield from _backward(info, gradient, gradient_layout(arriving))
    output = call.outputs[0]
    assert output is not None, call
    yield from _forward(output, made, wanted)
    if output.needs_grad:
        if not layouts.local_output:
            returned = dtensors.gradient_of(output, wanted)
            yield from _backward(output, returned, gradient_layout(wanted))
        yield from _backward(output, gradient_layout(wanted), gradient_layout(made))
    dtensors.remember(output, wanted, local=layouts.local_output)


def _leaves_sum(
    info: TensorInfo, gradient: Placement, arriving: Placement, dtensors: DTensors
) -> bool:
    """Whether a layer leaves the sum of a DTensor's gradient to the one that made it."""
    is_partial = isinstance(arriving, Replicate) and isinstance(gradient, Partial)
    return is_partial and info.identity in dtensors.layouts


def _parameter_moves(assignment: Assignment, num_ranks: int) -> Iterator[Move]:
    """The sums of the gradients of replicated parameters."""
    style, module = own_style(assignment.style), assignment.module
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    fused = fused_form(assignment)
    if fused is not None:
        for parameter in trained.values():
            for part in fused.split():
                if part.is_shared(num_ranks):
                    # Ranks that share a head have partial gradients of its parameters.
                    shape = (part.size, *parameter.shape[1:])
                    yield _gradient_sum(shape, parameter.dtype)
    elif isinstance(style, (SequenceParallel, ExpertParallel)):
        # All in one collective.
        placed = style.parameter_layouts(module)
        summed = [p for n, p in trained.items() if placed[n] == Replicate()]
        if summed:
            shape = (sum(parameter.numel() for parameter in summed),)
            yield _gradient_sum(shape, summed[0].dtype)


def _gradient_sum(shape: tuple[int, ...], dtype: torch.dtype) -> Move:
    return Move(Phase.BACKWARD, Partial(), Replicate(), shape, dtype)


def _input_moves(
    style: PrepareModuleInput, call: ModuleCall, dtensors: DTensors
) -> Iterator[Move]:
    given = style.input_layouts if isinstance(style.input_layouts, tuple) else ()
    desired = style.desired_input_layouts
    desired = desired if isinstance(desired, tuple) else ()
    for info, source, target in zip(call.inputs, given, desired, strict=False):
        yield from _prepared(info, source, target, style.use_local_output, dtensors)
    targets = style.desired_input_kwarg_layouts or {}
    for name, source in (style.input_kwarg_layouts or {}).items():
        info, target = call.keywords.get(name), targets.get(name)
        yield from _prepared(info, source, target, style.use_local_output, dtensors)


def _output_moves(
    style: PrepareModuleOutput, call: ModuleCall, dtensors: DTensors
) -> Iterator[Move]:
    given, desired = style.output_layouts, style.desired_output_layouts
    assert isinstance(given, tuple) and isinstance(desired, tuple)
    for info, source, target in zip(call.outputs, given, desired, strict=False):
        yield from _prepared(info, source, target, style.use_local_output, dtensors)


def _prepared(
    info: TensorInfo | None,
    source: Placement | None,
    target: Placement | None,
    local: bool,
    dtensors: DTensors,
) -> Iterator[Move]:
    if info is None or source is None:
        return
    arriving = dtensors.layouts.get(info.identity, source)
    target = target or arriving
    yield from _forward(info, arriving, target)
    if info.needs_grad:
        returned = gradient_layout(target)
        if not local:
            returned = dtensors.gradient_of(info, target)
        yield from _backward(info, returned, gradient_layout(arriving))
    dtensors.remember(info, target, local=local)


def _forward(info: TensorInfo, source: Placement, target: Placement) -> Iterator[Move]:
    yield Move(Phase.FORWARD, source, target, info.shape, info.dtype)


def _backward(info: TensorInfo, source: Placement, target: Placement) -> Iterator[Move]:
    yield Move(Phase.BACKWARD, source, target, info.shape, info.dtype)


# ----------------------------------------------------------------------------
# The communication of a plan, from the layouts of its styles and the calls of a model.
#
# What ``redistribute.move`` does with tensors, this does with shapes, by one table:
#
# | from      | to          | sends                                      |
# |-----------|-------------|--------------------------------------------|
# | Partial   | Replicate   | all_reduce of the whole tensor             |
# | Partial   | Shard(d)    | reduce_scatter of the whole, d padded      |
# | Shard(d)  | Replicate   | all_gather to the whole, d padded          |
# | Shard(d)  | Shard(e)    | all_to_all of one rank's shard, e padded   |
# | Replicate | anything    | nothing                                    |

_OPS = {
    Kind.ALL_REDUCE: "c10d_functional.all_reduce",
    Kind.ALL_GATHER: "c10d_functional.all_gather_into_tensor",
    Kind.REDUCE_SCATTER: "c10d_functional.reduce_scatter_tensor",
    Kind.ALL_TO_ALL: "c10d_functional.all_to_all_single",
}


class Prediction(NamedTuple):
    """What a plan will send, and the modules for which that is not known."""

    events: list[CommEvent]
    unknown: list[str]


def predict_collectives(
    assignments: Sequence[Assignment],
    calls: Sequence[ModuleCall],
    mesh: PlanMesh,
    model_name: str,
) -> Prediction:
    """Every collective of one forward and backward of the calls."""
    by_path = {assignment.path: assignment for assignment in assignments}
    group = Group(name="predicted", ranks=tuple(range(mesh.size)), axis=mesh.axis)
    dtensors = _follow_dtensors(by_path, calls, mesh.size)
    prediction = Prediction([], [])
    for call in calls:
        assignment = by_path[call.path]
        module = f"{model_name}.{call.path}" if call.path else model_name
        moves = moves_of(assignment, call, dtensors, mesh.size)
        if moves is None:
            prediction.unknown.append(call.path)
            continue
        for move in moves:
            event = _event(move, group, module)
            if event is not None:
                prediction.events.append(event)
    return prediction


def _follow_dtensors(
    by_path: Mapping[str, Assignment], calls: Sequence[ModuleCall], num_ranks: int
) -> DTensors:
    """Which sums are left to the module that made a DTensor.

    It is read after it is made, so this takes a walk over the calls of its own.
    """
    first = DTensors()
    for call in calls:
        moves_of(by_path[call.path], call, first, num_ranks)
    return DTensors(partial_gradients=first.partial_gradients)


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
            padded[placement.dim] = full_shard_size(shape[placement.dim], size) * size
    if isinstance(source, Shard) and isinstance(target, Shard):
        padded[source.dim] //= size  # an all-to-all exchanges one rank's shard
    return tuple(padded)


# Batch and length that few numbers divide: view(batch, -1, heads, size) with the heads of
# one device would otherwise make tokens of heads on a rank, without an error.
_ODD = (5, 7)


def forecast(
    model: nn.Module,
    resolved: Resolved,
    example: Inputs | None,
    tokens: tuple[int, int],
) -> tuple[Ledger, list[str]]:
    """The expected ledger of one forward and backward, and what it rests on.

    Args:
        model: The model, before the plan.
        resolved: The plan.
        example: Inputs of the model; None to make them from the number of tokens.
        tokens: Batch and sequence length.
    """
    assignments = resolved.assignments
    notes: list[str]
    try:
        inputs = example if example is not None else guess_inputs(model, *tokens)
        recording = record(model, inputs, [a.path for a in assignments])
        calls = recording.module_calls
        notes = [f"Shapes are those of a run on {describe_inputs(inputs)}."]
        if recording.why_eval:
            notes.append(
                f"It was run in eval mode, as in training mode {recording.why_eval}."
            )
        tried = inputs if example is not None else guess_inputs(model, *_ODD)
        failure = find_fixed_sizes(model, assignments, tried, resolved.mesh.size)
        if failure is not None:
            notes.append(
                f"The forward fails on the shapes of one rank, {failure}. Take sizes and "
                "numbers of heads from the tensors, not from the config: -1 in a view; "
                "for a fused layer that it splits, split_whole=True."
            )
    except NotRunnableError as error:
        tokens = tokens if example is None else _tokens_of(example) or tokens
        calls = list(_assumed_calls(assignments, *tokens))
        notes = [
            f"The model does not run on shapes alone ({error}): every layer is taken to "
            f"be called once on {tokens[0]} x {tokens[1]} tokens."
        ]
    prediction = predict_collectives(
        assignments, calls, resolved.mesh, type(model).__name__
    )
    called = {call.path for call in calls}
    notes += _each(
        (a.path for a in assignments if a.path not in called),
        "was not called, so what it sends is not counted.",
    )
    notes += _each(
        prediction.unknown, "sends an amount that is not known, and not counted."
    )
    ledger = Ledger()
    for event in prediction.events:
        ledger.append(event)
    return ledger, notes


def _tokens_of(inputs: Inputs) -> tuple[int, int] | None:
    """Batch and sequence length of the first input that has both."""
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    for value in values:
        if isinstance(value, torch.Tensor) and value.ndim > 1:
            return value.size(0), value.size(1)
    return None


def _each(paths: Iterable[str], what: str) -> list[str]:
    return [f"{name or 'the model'} {what}" for name in fold(list(paths))]


def _assumed_calls(
    assignments: Sequence[Assignment], batch: int, seq: int
) -> Iterable[ModuleCall]:
    """One call of each layer whose shapes follow from the layer itself."""
    for number, assignment in enumerate(assignments):
        module = assignment.module
        form = linear_form(module)
        if form is not None:
            sizes, dtype = form[:2], module.get_parameter("weight").dtype
            given = TensorInfo((batch, seq, sizes[0]), dtype, True, 2 * number)
        elif isinstance(module, nn.Embedding):
            sizes, dtype = (1, module.embedding_dim), module.weight.dtype
            given = TensorInfo((batch, seq), torch.long, False, 2 * number)
        elif (
            isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and module.weight is not None
        ):
            sizes, dtype = (1, module.normalized_shape[-1]), module.weight.dtype
            given = TensorInfo((batch, seq, sizes[1]), dtype, True, 2 * number)
        else:
            continue
        output = TensorInfo((batch, seq, sizes[1]), dtype, True, 2 * number + 1)
        yield ModuleCall(assignment.path, (given,), {}, (output,))
