"""The communication that a plan will cause, as a ledger that nothing has sent."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchspmd.comm import CommEvent, Group, Kind, Ledger, Phase, wire_bytes
from torchspmd.layout.shards import full_shard_size
from torchspmd.parallel.axis import gradient_layout, positive_dim
from torchspmd.parallel.experts import ExpertParallel, ReplicateParallel
from torchspmd.parallel.fused import FusedColwiseParallel
from torchspmd.parallel.linear import RowwiseParallel, ShardedStyle
from torchspmd.parallel.plan.assignment import Assignment, fused_form, own_twin
from torchspmd.parallel.plan.calls import (
    Call,
    Facts,
    Inputs,
    NotRunnableError,
    describe_inputs,
    guess_inputs,
    run_on_shapes,
)
from torchspmd.parallel.plan.dry_run import find_fixed_sizes
from torchspmd.parallel.plan.mesh import PlanMesh
from torchspmd.parallel.plan.names import fold
from torchspmd.parallel.plan.resolve import Resolved
from torchspmd.parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from torchspmd.parallel.sequence import SequenceParallel

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
class Handed:
    """The DTensors that modules hand to each other, by identity.

    Attributes:
        layouts: Their layouts.
        in_terms: Those whose gradient comes back as terms of a sum, because all that
            read them leave the sum to whoever made the DTensor.
    """

    layouts: dict[int, Placement] = field(default_factory=dict)
    in_terms: set[int] = field(default_factory=set)

    def gradient_of(self, facts: Facts, layout: Placement) -> Placement:
        """The layout in which the gradient of a tensor with this layout comes back."""
        return Partial() if facts.identity in self.in_terms else gradient_layout(layout)


def moves_of(
    assignment: Assignment, call: Call, handed: Handed, num_ranks: int
) -> list[Move] | None:
    """The layout changes of one call; None where the style does not tell.

    Args:
        assignment: The module and its style.
        call: The module's tensors.
        handed: The tensors that are DTensors by now; written to.
        num_ranks: How many ranks the axis has.
    """
    style, module = own_twin(assignment.style), assignment.module
    fused = fused_form(assignment)
    if fused is not None:
        return list(_fused_moves(fused, module, call, handed, num_ranks))
    if isinstance(style, ExpertParallel):
        return list(_expert_moves(style, call, handed))
    if isinstance(style, ReplicateParallel):
        return []
    if isinstance(style, ShardedStyle):
        return list(_sharded_moves(style, module, call, handed))
    if isinstance(style, SequenceParallel):
        return _sequence_moves(style, module, call, handed)
    if isinstance(style, PrepareModuleInput):
        return list(_input_moves(style, call, handed))
    if isinstance(style, PrepareModuleOutput):
        return list(_output_moves(style, call, handed))
    if isinstance(style, PrepareModuleInputOutput):
        before = list(_input_moves(style.prepare_module_input, call, handed))
        after = list(_output_moves(style.prepare_module_output, call, handed))
        return before + after
    return None


def _sharded_moves(
    style: ShardedStyle, module: nn.Module, call: Call, handed: Handed
) -> Iterator[Move]:
    given, output = call.inputs[0], call.outputs[0]
    assert given is not None and output is not None, call
    assert isinstance(style.input_layouts, tuple)
    assert isinstance(style.output_layouts, tuple)
    needed: Placement = Replicate()
    made: Placement = Shard(-1)
    if isinstance(style, RowwiseParallel):
        (needed,), made = style.desired_input_layouts(module), Partial()
    arriving = handed.layouts.get(given.identity, style.input_layouts[0])
    wanted = style.output_layouts[0]
    yield from _there(given, arriving, needed)
    yield from _there(output, made, wanted)
    if output.needs_grad:
        yield from _returned(output, wanted, style.use_local_output, handed)
        yield from _back(output, gradient_layout(wanted), gradient_layout(made))
    if given.needs_grad:
        made_gradient = Partial() if isinstance(needed, Replicate) else needed
        yield from _input_gradient(given, made_gradient, arriving, handed)
    _remember(output, wanted, style.use_local_output, handed)


def _fused_moves(
    style: FusedColwiseParallel,
    module: nn.Module,
    call: Call,
    handed: Handed,
    num_ranks: int,
) -> Iterator[Move]:
    given, output = call.inputs[0], call.outputs[0]
    assert given is not None and output is not None, call
    assert isinstance(style.input_layouts, tuple)
    arriving = handed.layouts.get(given.identity, style.input_layouts[0])
    yield from _there(given, arriving, Replicate())
    if given.needs_grad:
        yield from _input_gradient(given, Partial(), arriving, handed)
    trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
    for parameter in trained:
        for part in style.split():
            if part.is_shared(num_ranks):
                # Ranks that share a head have terms of its parameters' gradients.
                shape = (part.size, *parameter.shape[1:])
                yield Move(
                    Phase.BACKWARD, Partial(), Replicate(), shape, parameter.dtype
                )


def _expert_moves(style: ExpertParallel, call: Call, handed: Handed) -> Iterator[Move]:
    given, needed = style.input_layouts, style.desired_input_layouts
    assert isinstance(given, tuple) and isinstance(needed, tuple)
    assert isinstance(style.output_layouts, tuple)
    for facts, source, target in zip(call.inputs, given, needed, strict=False):
        if facts is None or source is None or target is None:
            continue
        arriving = handed.layouts.get(facts.identity, source)
        yield from _there(facts, arriving, target)
        if facts.needs_grad:
            made = Partial() if isinstance(target, Replicate) else target
            yield from _back(facts, made, gradient_layout(arriving))
    output = call.outputs[0]
    assert output is not None, call
    wanted = style.output_layouts[0]
    yield from _there(output, Partial(), wanted)
    if output.needs_grad:
        yield from _returned(output, wanted, style.use_local_output, handed)
        yield from _back(output, gradient_layout(wanted), Replicate())
    _remember(output, wanted, style.use_local_output, handed)


def _sequence_moves(
    style: SequenceParallel,
    module: nn.Module,
    call: Call,
    handed: Handed,
) -> list[Move] | None:
    given, output = call.inputs[0], call.outputs[0]
    assert given is not None and output is not None, call
    (layout,) = style.sequence_sharding
    _remember(output, layout, style.use_local_output, handed)
    trained = [p for p in module.parameters() if p.requires_grad]
    if trained and type(module) not in (nn.LayerNorm, nn.RMSNorm):
        return None  # DTensor decides when it sums the gradients
    arriving = handed.layouts.get(given.identity, layout)
    moves = list(_there(given, arriving, layout))
    if given.needs_grad:
        moves += _back(given, layout, gradient_layout(arriving))
    if trained:
        shape = (sum(p.numel() for p in trained),)
        dtype = trained[0].dtype
        moves.append(Move(Phase.BACKWARD, Partial(), Replicate(), shape, dtype))
    return moves


def _input_moves(
    style: PrepareModuleInput, call: Call, handed: Handed
) -> Iterator[Move]:
    given = style.input_layouts if isinstance(style.input_layouts, tuple) else ()
    desired = style.desired_input_layouts
    desired = desired if isinstance(desired, tuple) else ()
    for facts, source, target in zip(call.inputs, given, desired, strict=False):
        yield from _prepared(facts, source, target, style.use_local_output, handed)
    targets = style.desired_input_kwarg_layouts or {}
    for name, source in (style.input_kwarg_layouts or {}).items():
        facts, target = call.keywords.get(name), targets.get(name)
        yield from _prepared(facts, source, target, style.use_local_output, handed)


def _output_moves(
    style: PrepareModuleOutput, call: Call, handed: Handed
) -> Iterator[Move]:
    given, desired = style.output_layouts, style.desired_output_layouts
    assert isinstance(given, tuple) and isinstance(desired, tuple)
    for facts, source, target in zip(call.outputs, given, desired, strict=False):
        yield from _prepared(facts, source, target, style.use_local_output, handed)


def _prepared(
    facts: Facts | None,
    source: Placement | None,
    target: Placement | None,
    local: bool,
    handed: Handed,
) -> Iterator[Move]:
    if facts is None or source is None:
        return
    arriving = handed.layouts.get(facts.identity, source)
    target = target or arriving
    yield from _there(facts, arriving, target)
    if facts.needs_grad:
        returned = gradient_layout(target)
        if not local:
            returned = handed.gradient_of(facts, target)
        yield from _back(facts, returned, gradient_layout(arriving))
    _remember(facts, target, local, handed)


def _input_gradient(
    facts: Facts, made: Placement, arriving: Placement, handed: Handed
) -> Iterator[Move]:
    """The way of an input's gradient out of a layer that made it in this layout."""
    is_dtensor = facts.identity in handed.layouts
    if is_dtensor and isinstance(arriving, Replicate) and isinstance(made, Partial):
        # Layers that share a DTensor leave the sum to the one that made it.
        handed.in_terms.add(facts.identity)
        return
    yield from _back(facts, made, gradient_layout(arriving))


def _returned(
    facts: Facts, layout: Placement, local: bool, handed: Handed
) -> Iterator[Move]:
    """What the gradient of an output goes through before the layer's own backward."""
    if not local:
        returned = handed.gradient_of(facts, layout)
        yield from _back(facts, returned, gradient_layout(layout))


def _remember(facts: Facts, layout: Placement, local: bool, handed: Handed) -> None:
    """A DTensor tells the next module its layout; a plain tensor does not."""
    if local:
        handed.layouts.pop(facts.identity, None)
    else:
        handed.layouts[facts.identity] = layout


def _there(facts: Facts, source: Placement, target: Placement) -> Iterator[Move]:
    yield Move(Phase.FORWARD, source, target, facts.shape, facts.dtype)


def _back(facts: Facts, source: Placement, target: Placement) -> Iterator[Move]:
    yield Move(Phase.BACKWARD, source, target, facts.shape, facts.dtype)


# ----------------------------------------------------------------------------
# The communication of a plan, from the layouts of its styles and the calls of a model.
#
# What ``exchange.move`` does with tensors, this does with shapes; both follow one table:
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
            padded[placement.dim] = full_shard_size(shape[placement.dim], size) * size
    if isinstance(source, Shard) and isinstance(target, Shard):
        padded[source.dim] //= size  # an all-to-all hands over one rank's shard
    return tuple(padded)


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
        calls = run_on_shapes(model, [a.path for a in assignments], inputs)
        notes = [f"Shapes are those of a run on {describe_inputs(inputs)}."]
        failure = find_fixed_sizes(model, assignments, inputs, resolved.mesh.size)
        if failure is not None:
            notes.append(
                f"The forward fails on the shapes of one rank, {failure}. Take sizes and "
                "numbers of heads from the tensors, not from the config: -1 in a view."
            )
    except NotRunnableError as error:
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


def _each(paths: Iterable[str], what: str) -> list[str]:
    return [f"{name or 'the model'} {what}" for name in fold(list(paths))]


def _assumed_calls(
    assignments: Sequence[Assignment], batch: int, seq: int
) -> Iterable[Call]:
    """One call of each layer whose shapes follow from the layer itself."""
    for number, assignment in enumerate(assignments):
        module = assignment.module
        if isinstance(module, nn.Linear):
            sizes, dtype = (
                (module.in_features, module.out_features),
                module.weight.dtype,
            )
            given = Facts((batch, seq, sizes[0]), dtype, True, 2 * number)
        elif isinstance(module, nn.Embedding):
            sizes, dtype = (1, module.embedding_dim), module.weight.dtype
            given = Facts((batch, seq), torch.long, False, 2 * number)
        elif (
            isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and module.weight is not None
        ):
            sizes, dtype = (1, module.normalized_shape[-1]), module.weight.dtype
            given = Facts((batch, seq, sizes[1]), dtype, True, 2 * number)
        else:
            continue
        output = Facts((batch, seq, sizes[1]), dtype, True, 2 * number + 1)
        yield Call(assignment.path, (given,), {}, (output,))
