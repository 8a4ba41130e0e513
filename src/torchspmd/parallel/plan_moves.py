"""The layout changes that a style makes in one call, forward and backward."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from torchspmd.comm import Phase
from torchspmd.parallel.axis import gradient_layout
from torchspmd.parallel.experts import ExpertParallel, ReplicateParallel
from torchspmd.parallel.fused import FusedColwiseParallel
from torchspmd.parallel.plan_assignment import Assignment, fused_form, own_twin
from torchspmd.parallel.plan_calls import Call, Facts
from torchspmd.parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from torchspmd.parallel.rowwise import RowwiseParallel
from torchspmd.parallel.sequence import SequenceParallel
from torchspmd.parallel.sharded import ShardedStyle


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
