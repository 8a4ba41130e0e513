"""Run a model on the shapes of one rank, to find forwards that have sizes written in.

``x.view(batch, tokens, self.num_heads, head_dim)`` is right on one device and fails when a
rank has some of the heads. Only plans whose modules take and return whole tensors or
shards of the features are run so: their collectives do not change other shapes.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard

from torchspmd.layout.placements import (
    positive_dim,
)
from torchspmd.layout.shards import shard_size
from torchspmd.parallel.linear import ShardedStyle
from torchspmd.parallel.plan.assignment import (
    Assignment,
    own_style,
    parameter_layouts,
)
from torchspmd.parallel.plan.copies import copy_shapes
from torchspmd.parallel.plan.run import (
    Inputs,
    NotRunnableError,
    call_on_shapes,
    module_hooks,
    state_of,
)
from torchspmd.parallel.style import StyleLayouts

_FEATURES = Shard(-1)


def find_fixed_sizes(
    model: nn.Module, assignments: Sequence[Assignment], inputs: Inputs, num_ranks: int
) -> str | None:
    """Why the model's forward fails on the shapes of rank 0; None when it does not.

    Call it for inputs on which the whole model runs.
    """
    layouts = [_feature_layouts(assignment) for assignment in assignments]
    if num_ranks == 1 or None in layouts:
        return None
    model = copy_shapes(model)
    state = _local_state(model, assignments, num_ranks)
    with contextlib.ExitStack() as hooks:
        for assignment, known in zip(assignments, layouts, strict=True):
            assert known is not None
            collectives = _Collectives(assignment.module, known, num_ranks)
            hooks.enter_context(
                module_hooks(
                    model.get_submodule(assignment.path),
                    collectives.enter,
                    collectives.leave,
                )
            )
        try:
            with torch.no_grad():
                call_on_shapes(model, state, inputs)
        except NotRunnableError as error:
            return f"in '{error.path}': {error}"
    return None


def _feature_layouts(assignment: Assignment) -> StyleLayouts | None:
    """The layouts of a module, if they are whole tensors or shards of features."""
    style = own_style(assignment.style)
    if not isinstance(style, ShardedStyle) or not style.use_local_output:
        return None
    layouts = style.layouts(assignment.module)
    assert layouts is not None
    outside = (*layouts.inputs, layouts.output)
    is_plain = all(layout in (Replicate(), _FEATURES) for layout in outside)
    return layouts if is_plain else None


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


class _Collectives:
    """Hooks that change the shapes of a module's input and output as its style does."""

    def __init__(
        self, module: nn.Module, layouts: StyleLayouts, num_ranks: int
    ) -> None:
        self._layouts, self._num_ranks = layouts, num_ranks
        self._read, self._written = _feature_counts(module)

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not args:
            return None
        (given,), (needed,) = self._layouts.inputs, self._layouts.desired_inputs
        return (self._change(args[0], given, needed, self._read), *args[1:]), kwargs

    def leave(
        self, module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor
    ) -> torch.Tensor:
        # What every rank sums is whole after the sum.
        computed, wanted = self._layouts.computed, self._layouts.output
        whole = computed if computed == _FEATURES else Replicate()
        return self._change(output, whole, wanted, self._written)

    def _change(
        self,
        tensor: torch.Tensor,
        source: Placement | None,
        target: Placement | None,
        features: int,
    ) -> torch.Tensor:
        """A tensor of the shape that another layout gives."""
        if source == target:
            return tensor
        num_ranks = 1 if source == _FEATURES else self._num_ranks
        size = shard_size(features, num_ranks, 0)
        return tensor.new_empty((*tensor.shape[:-1], size))


def _feature_counts(module: nn.Module) -> tuple[int, int]:
    """The features that a layer reads and writes on one device."""
    if isinstance(module, nn.Embedding):
        return 0, module.embedding_dim
    assert isinstance(module, nn.Linear), type(module)
    return module.in_features, module.out_features
