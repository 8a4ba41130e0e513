"""The default mode: the result of the same step on one device with all ranks' batches.

Batches are sharded on dim 0 and everything else is replicated; DTensor's rules decide
where a sum over ranks is needed. Functions that compute over the global batch (batch norm,
dropout) are decomposed here, because DTensor's rules compute them over one rank's part.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, cast, final

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from torchspmd import _torch
from torchspmd.errors import CaptureError
from torchspmd.step.capture.inventory import Role, Slot
from torchspmd.step.capture.parallel_mode import ParallelMode
from torchspmd.step.capture.refusals import RefusalError
from torchspmd.step.capture.trace_modes import FunctionMode
from torchspmd.step.modes.global_batch_ops import (
    GlobalBatchOperators,
    as_replicated,
    empty_full,
    local_part,
    redistributed,
    reduce_partial,
)

_UNREADABLE = "shards"  # no role: a step that reads it is refused


@final
class GlobalBatch(ParallelMode):
    """Inputs ``Shard(0)``, everything else ``Replicate``, on a mesh of one axis."""

    takes_layouts = False
    reduces = True

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh: DeviceMesh = mesh

    def show(self, slot: Slot, local: torch.Tensor) -> torch.Tensor:
        """A DTensor around the traced tensor."""
        layout = _torch.layout_of(slot.tensor)
        if layout is not None:
            if layout.mesh != self.mesh:
                raise CaptureError(
                    f"compile: argument {slot.name} is a DTensor on {layout.mesh}, the "
                    f"step runs on {self.mesh}. Put both on one mesh."
                )
            return _torch.wrap_local(local, layout)
        if slot.role is Role.STATE or slot.role is Role.HYPER:
            return local  # only the optimizer sees it, and that runs on plain tensors
        if slot.role is Role.INPUT and local.ndim > 0:
            return _torch.wrap_local(local, self._batch_spec(local))
        return cast(torch.Tensor, as_replicated(local, self.mesh))

    def _batch_spec(self, local: torch.Tensor) -> Any:
        size, rows = self.mesh.size(), local.stride(0)
        shape = (local.shape[0] * size, *local.shape[1:])
        # A dim that lies outside of the rows in memory is wider in the global batch.
        stride = tuple(step * size if step > rows else step for step in local.stride())
        return _torch.strided_spec(self.mesh, (Shard(0),), shape, stride, local.dtype)

    def reduce(self, gradient: torch.Tensor) -> torch.Tensor:
        """Sum a gradient that is still partial over the ranks."""
        if not isinstance(gradient, DTensor):  # of a plain tensor: every rank has it
            return cast(torch.Tensor, as_replicated(gradient, self.mesh))
        return redistributed(gradient, (Replicate(),))

    def result(self, value: torch.Tensor) -> torch.Tensor:
        """Partial values reduced; of a value sharded by the batch, this rank's rows."""
        return _torch.plain_tensor(reduce_partial(value))

    def role_of_stored(self, value: torch.Tensor) -> str:
        """Rows come in again as rows, what is whole as a buffer; other shards do not."""
        layout = _torch.layout_of(value)
        if layout is None or not layout.placements[0].is_shard():
            return Role.BUFFER
        return Role.INPUT if layout.placements[0].is_shard(0) else _UNREADABLE

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Plain tensors made inside the step count as replicated."""
        # Not at the top: importing it registers operators.
        from torch.distributed.tensor.experimental import implicit_replication

        functions = _GlobalBatchFunctions()
        with (
            implicit_replication(),
            _torch.layouts_by_value(),
            GlobalBatchOperators(),
            functions,
            _torch.backward_under(functions),
            warnings.catch_warnings(),
        ):
            # Random operators are written out here, and need no support on the mesh.
            warnings.filterwarnings("ignore", message="DTensor random operators")
            # Replicated is what such a tensor is.
            warnings.filterwarnings("ignore", message="Found a non-scalar tensor with")
            yield


class _GlobalBatchFunctions(FunctionMode):
    """Batch norm and dropout over the global batch, not over this rank's part."""

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function, or its form for the global batch."""
        code: Any = getattr(func, "__code__", None)
        own = _OWN.get(func) or _OWN_BY_CODE.get(code)
        if own is not None and args and isinstance(args[0], DTensor):
            return own(*args, **kwargs)
        return func(*args, **kwargs)


def batch_norm(  # noqa: PLR0913, PLR0917  # the arguments of torch's own function
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``F.batch_norm`` in operators that have sharding rules."""
    dims = [dim for dim in range(x.ndim) if dim != 1]
    shape = [1, -1] + [1] * (x.ndim - 2)
    mean, var = running_mean, running_var
    if training:
        mean = x.mean(dims)
        var = (x - mean.view(shape)).square().mean(dims)
        if running_mean is not None and running_var is not None:
            count = x.numel() // x.shape[1]
            with torch.no_grad():
                _blend(running_mean, mean, momentum)
                _blend(running_var, var * (count / (count - 1)), momentum)
    assert mean is not None and var is not None
    out = (x - mean.view(shape)) * (var + eps).rsqrt().view(shape)
    return _scaled(out, weight, bias)


def instance_norm(  # noqa: PLR0913, PLR0917  # the arguments of torch's own function
    x: torch.Tensor,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    """``F.instance_norm``, whose running statistics are those of the global batch."""
    if not use_input_stats:
        stats = (running_mean, running_var)
        return batch_norm(x, *stats, weight, bias, training=False, eps=eps)
    dims = list(range(2, x.ndim))
    mean = x.mean(dims, keepdim=True)
    var = (x - mean).square().mean(dims, keepdim=True)
    if running_mean is not None and running_var is not None:
        count = math.prod(x.shape[2:])
        with torch.no_grad():
            _blend(running_mean, mean.flatten(1).mean(0), momentum)
            _blend(
                running_var, var.flatten(1).mean(0) * (count / (count - 1)), momentum
            )
    return _scaled((x - mean) * (var + eps).rsqrt(), weight, bias)


def _scaled(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    shape = [1, -1] + [1] * (x.ndim - 2)
    if weight is not None:
        x = x * weight.view(shape)
    return x if bias is None else x + bias.view(shape)


def _blend(running: torch.Tensor, new: torch.Tensor, momentum: float) -> None:
    if isinstance(new, DTensor) and isinstance(running, DTensor):
        new = redistributed(new, running.placements)
    running.mul_(1 - momentum).add_(new, alpha=momentum)


def dropout(
    x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """``F.dropout`` with the mask that one device would draw for the global batch.

    Every rank draws the whole mask and keeps its part, so ranks with one seed drop what
    one device with that seed would drop.
    """
    if not training or p == 0:
        return x
    assert isinstance(x, DTensor), type(x)
    dropped = x * _mask(x, p) if p < 1 else x * 0.0
    return x.copy_(dropped) if inplace else dropped


def _mask(x: DTensor, p: float) -> torch.Tensor:
    noise = torch.empty_like(empty_full(x))  # as torch makes it: in x's memory order
    noise.bernoulli_(1 - p)
    noise.div_(1 - p)
    return local_part(noise, x)


def _pooled(pool: Callable[..., torch.Tensor], x: torch.Tensor, size: Any) -> Any:
    """A pool that need not note another order of memory, which DTensor cannot."""
    return pool(x.contiguous(), size)


def _recurrent(layers: Callable[..., Any], x: torch.Tensor, *args: Any) -> Any:
    """Recurrent layers as torch writes them out: its kernels have no sharding rules."""
    if len(args) < _NUM_OPTIONS:  # of packed sequences, whose lengths differ by row
        raise RefusalError(
            "a recurrent layer on a packed sequence",
            "Each rank would have steps of other ranks' rows.\nPass padded sequences, or "
            "compute on each rank's own batch with parallel='replicate'.",
        )
    *others, rows_first = args
    with _torch.without_rnn_kernels():
        made, *states = layers(x.transpose(0, 1) if rows_first else x, *others, False)
    return (made.transpose(0, 1) if rows_first else made, *states)


# States, weights, bias, layers, dropout, training, both ways, rows first.
_NUM_OPTIONS = 8
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
_POOLS = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
_OWN: dict[Callable[..., Any], Callable[..., torch.Tensor]] = {
    **{pool: functools.partial(_pooled, pool) for pool in _POOLS},
    **{layers: functools.partial(_recurrent, layers) for layers in _RECURRENT},
    F.batch_norm: batch_norm,
    F.instance_norm: instance_norm,
    F.dropout: dropout,
}
# Of a function that the user has put another one around (F.dropout = mine).
_OWN_BY_CODE = {
    function.__code__: own
    for function, own in _OWN.items()
    if isinstance(function, FunctionType)
}
