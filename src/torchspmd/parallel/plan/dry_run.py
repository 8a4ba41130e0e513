"""Run a model on the shapes of one rank, to find forwards that have sizes written in.

``x.view(batch, tokens, self.num_heads, head_dim)`` is right on one device and fails when a
rank has some of the heads. Only plans whose modules take and hand on whole tensors or
shards of the features are run so: their collectives do not change other shapes.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from torchspmd.layout.shards import shard_size
from torchspmd.parallel.axis import positive_dim
from torchspmd.parallel.linear import ColwiseParallel, ShardedStyle
from torchspmd.parallel.plan.assignment import (
    Assignment,
    own_twin,
    parameter_layouts,
)
from torchspmd.parallel.plan.calls import (
    Inputs,
    NotRunnableError,
    call_on_meta,
    meta_state,
)

_FEATURES = Shard(-1)


def find_fixed_sizes(
    model: nn.Module, assignments: Sequence[Assignment], inputs: Inputs, num_ranks: int
) -> str | None:
    """Why the model's forward fails on the shapes of rank 0; None when it does not.

    Call it for inputs on which the whole model runs.
    """
    if num_ranks == 1 or not all(map(_is_plain, assignments)):
        return None
    state = _local_state(model, assignments, num_ranks)
    stack = _ModuleStack(model)
    with contextlib.ExitStack() as hooks:
        hooks.enter_context(stack.watching())
        for assignment in assignments:
            hooks.enter_context(_collectives(assignment, num_ranks))
        try:
            with torch.no_grad():
                call_on_meta(model, state, inputs)
        except NotRunnableError as error:
            return f"in '{stack.current}': {error}"
    return None


def _is_plain(assignment: Assignment) -> bool:
    style = own_twin(assignment.style)
    if not isinstance(style, ShardedStyle) or not style.use_local_output:
        return False
    layouts = (style.input_layouts, style.output_layouts)
    return all(layout in ((Replicate(),), (_FEATURES,)) for layout in layouts)


def _local_state(
    model: nn.Module, assignments: Sequence[Assignment], num_ranks: int
) -> dict[str, torch.Tensor]:
    """Stand-ins for the parameters as rank 0 holds them; ties are kept."""
    state = meta_state(model)
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


@contextlib.contextmanager
def _collectives(assignment: Assignment, num_ranks: int) -> Iterator[None]:
    """Let a module take and hand on what its style says."""
    style, module = own_twin(assignment.style), assignment.module
    assert isinstance(style, ShardedStyle)
    is_colwise = isinstance(style, ColwiseParallel)
    needed = (
        Replicate() if is_colwise or isinstance(module, nn.Embedding) else _FEATURES
    )
    made = _FEATURES if is_colwise else Replicate()

    read, written = _feature_counts(module)

    def enter(module: nn.Module, args: Any) -> Any:
        if not args:
            return None
        given = _only(style.input_layouts)
        return (_change(args[0], given, needed, read, num_ranks), *args[1:])

    def leave(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        wanted = _only(style.output_layouts)
        return _change(output, made, wanted, written, num_ranks)

    handles = (
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _only(layouts: object) -> Placement:
    assert isinstance(layouts, tuple)
    layout = layouts[0]
    assert isinstance(layout, Placement)
    return layout


def _feature_counts(module: nn.Module) -> tuple[int, int]:
    """The features that a layer reads and writes on one device."""
    if isinstance(module, nn.Embedding):
        return 0, module.embedding_dim
    assert isinstance(module, nn.Linear), type(module)
    return module.in_features, module.out_features


def _change(
    tensor: torch.Tensor,
    source: Placement,
    target: Placement,
    features: int,
    num_ranks: int,
) -> torch.Tensor:
    """A stand-in for the tensor in another layout."""
    if source == target:
        return tensor
    size = features if source == _FEATURES else shard_size(features, num_ranks, 0)
    return tensor.new_empty((*tensor.shape[:-1], size))


class _ModuleStack:
    """Which module is running; after an error, which one was."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._open: list[str] = []

    @property
    def current(self) -> str:
        return self._open[-1] if self._open else ""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handles = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) in self._paths:
            self._open.append(self._paths[id(module)])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in self._paths:
            self._open.pop()
