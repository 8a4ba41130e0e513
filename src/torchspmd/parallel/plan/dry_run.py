"""Run a model on the shapes of one rank, to find forwards that have sizes written in.

``x.view(batch, tokens, self.num_heads, head_dim)`` is right on one device and fails when a
rank has some of the heads. Only plans whose layers take and return whole tensors or shards
of the features are run so, with layers that return tensors of the right shape.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from torchspmd.errors import LayoutError
from torchspmd.layout.placements import positive_dim
from torchspmd.layout.shards import shard_size
from torchspmd.parallel.experts import ReplicateParallel
from torchspmd.parallel.fused import FusedOutput
from torchspmd.parallel.linear import ShardedStyle, linear_form
from torchspmd.parallel.plan.assignment import (
    Assignment,
    fused_form,
    own_style,
    parameter_layouts,
)
from torchspmd.parallel.plan.copies import copy_shapes
from torchspmd.parallel.plan.run import (
    Inputs,
    NotRunnableError,
    call_on_shapes,
    shapes_of,
    state_of,
)
from torchspmd.parallel.sequence import SequenceParallel

_FEATURES = Shard(-1)


def find_fixed_sizes(
    model: nn.Module, assignments: Sequence[Assignment], inputs: Inputs, num_ranks: int
) -> NotRunnableError | None:
    """Why the model's forward fails on the shapes of rank 0; None when it does not.

    Call it for inputs on which the whole model runs.
    """
    if num_ranks == 1 or not all(map(_is_simulated, assignments)):
        return None
    copied = copy_shapes(model).eval()
    state = _local_state(copied, assignments, num_ranks)
    for assignment in assignments:
        if isinstance(own_style(assignment.style), ShardedStyle) or fused_form(
            assignment
        ):
            layer = copied.get_submodule(assignment.path)
            layer.forward = _Layer(assignment, num_ranks)
    try:
        with torch.no_grad():
            call_on_shapes(copied, state, shapes_of(inputs), [])
    except NotRunnableError as error:
        return error
    return None


def _is_simulated(assignment: Assignment) -> bool:
    """Whether tensors between modules are plain: whole, or shards of the features."""
    style = own_style(assignment.style)
    if isinstance(style, ReplicateParallel):
        return style.use_local_output
    if isinstance(style, SequenceParallel):
        return style.use_local_output
    layouts = None if style is None else style.layouts(assignment.module)
    if layouts is None or not layouts.local_output:
        return False
    if not isinstance(style, ShardedStyle) and fused_form(assignment) is None:
        return False
    outside = (*layouts.inputs, layouts.output)
    return all(layout in (Replicate(), _FEATURES) for layout in outside)


def _local_state(
    model: nn.Module, assignments: Sequence[Assignment], num_ranks: int
) -> dict[str, torch.Tensor]:
    """Tensors without values, as rank 0 holds the parameters; ties are kept."""
    state = state_of(model)
    made: dict[int, torch.Tensor] = {}
    for assignment in assignments:
        for path, layout in (parameter_layouts(assignment) or {}).items():
            whole = state[path]
            if id(whole) not in made:
                made[id(whole)] = _shard(whole, layout, num_ranks)
    return {path: made.get(id(tensor), tensor) for path, tensor in state.items()}


def _shard(tensor: torch.Tensor, layout: Placement, num_ranks: int) -> torch.Tensor:
    layout = positive_dim(layout, tensor.ndim)
    if not isinstance(layout, Shard):
        return tensor
    size = shard_size(tensor.size(layout.dim), num_ranks, 0)
    return tensor.detach().narrow(layout.dim, 0, size)


class _Layer:
    """The forward of a styled layer on shapes, as rank 0 sees it."""

    def __init__(self, assignment: Assignment, num_ranks: int) -> None:
        style = own_style(assignment.style)
        assert style is not None
        layouts = style.layouts(assignment.module)
        assert layouts is not None
        (given,) = layouts.inputs
        form, fused = linear_form(assignment.module), fused_form(assignment)
        self._name, self._fused = assignment.path, fused
        self._read: int | None = None
        if form is None:
            assert isinstance(assignment.module, nn.Embedding)
            width = assignment.module.embedding_dim
        else:
            width = form.outside
            is_cut = given == _FEATURES
            self._read = shard_size(form.inside, num_ranks if is_cut else 1, 0)
        self._sizes = [width]
        if fused is not None:
            self._sizes = [part.local_size(num_ranks, 0) for part in fused.split()]
        elif layouts.output == _FEATURES:
            self._sizes = [shard_size(width, num_ranks, 0)]

    def __call__(self, input: Any) -> Any:
        """A tensor of the shape that the layer returns."""
        if self._read is None:
            return torch.empty((*input.shape, *self._sizes))
        if input.shape[-1] != self._read:
            raise LayoutError(
                f"'{self._name}' reads {self._read} features on a rank and gets "
                f"{input.shape[-1]}"
            )
        front = input.shape[:-1]
        if self._fused is None or not self._fused.split_whole:
            return input.new_empty((*front, sum(self._sizes)))
        parts = [input.new_empty((*front, size)) for size in self._sizes]
        return FusedOutput(parts, self._fused.parts)
