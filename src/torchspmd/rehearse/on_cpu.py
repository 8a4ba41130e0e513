"""Code for GPUs on a CPU, with real tensors: ``cuda`` is the name of the host.

``torch.cuda`` speaks of the GPU as in a rehearsal, and so does autocast. Tensors have
values and lie in memory, so what a script computes and branches on is true; their device
reads ``cpu``, since nothing in torch tells two kinds of tensors of the host apart.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from torchspmd import _torch
from torchspmd.rehearse.device import Gpu, NoMemory, fake_cuda
from torchspmd.rehearse.kernels import cuda_autocast
from torchspmd.rehearse.nodes import Nodes
from torchspmd.rehearse.recorder import Recorder
from torchspmd.rehearse.recording import Recording
from torchspmd.rehearse.values import Values
from torchspmd.rehearse.workspaces import Processor
from torchspmd.rehearse.world import NoMail, object_collectives

__all__ = ["cuda_on_cpu"]

_CPU = torch.device("cpu")


@contextlib.contextmanager
def cuda_on_cpu(gpu: Gpu) -> Iterator[list[str]]:
    """Inside, code that asks for ``cuda`` runs on this machine's ``cpu``.

    Args:
        gpu: What it is told of its GPU.

    Yields:
        What a reader of the results must know; complete once it is closed.
    """
    recording = Recording(gpu.count, 0, Nodes(gpu.count))
    values = Values(recording.notes)
    shown = _torch.ShownAsCuda(_never, _no_effect, inner=_CPU)
    recorder = Recorder(recording, values, Processor(gpu.capability, gpu.processors))
    try:
        with contextlib.ExitStack() as stack:
            enter = stack.enter_context
            enter(fake_cuda(recorder, shown, gpu, NoMemory(values)))
            enter(cuda_autocast())
            enter(_sync_batch_norm_kernels())
            objects = object_collectives(NoMail())
            for owner, name, value in (*_replacements(shown, values.note), *objects):
                enter(mock.patch.object(owner, name, value))
            enter(shown)
            yield recording.notes
    finally:
        recording.notes.extend(recording.skipped)
        if shown.is_named:
            values.note(
                "The script's cuda was the CPU of this machine: its tensors are real, and "
                "their device and is_cuda say cpu. With --fake the script sees a GPU."
            )


def _never(call: str, tensor: torch.Tensor) -> Any:
    raise AssertionError(f"{call}: only a tensor without memory has no values")


def _no_effect(*args: Any) -> None:
    """Streams of the host need not know which tensors they use."""


def _replacements(
    shown: _torch.ShownAsCuda, note: Callable[[str], None]
) -> Iterator[tuple[Any, str, Any]]:
    plain_mesh: Any = DeviceMesh.__init__

    def build_mesh(mesh: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        plain_mesh(mesh, _on_cpu(device_type), *args, **kwargs)

    yield DeviceMesh, "__init__", build_mesh
    plain_fsdp: Any = FullyShardedDataParallel.__init__

    @functools.wraps(plain_fsdp)
    def build_fsdp(module: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.pop("sync_module_states", False):  # refuses tensors of the host
            note(
                "FullyShardedDataParallel(sync_module_states=True): what it sends when it "
                "is made is not seen on a CPU; with --fake it is."
            )
        # It would ask the driver for its device.
        plain_fsdp(module, *args, **{**kwargs, "device_id": _CPU})

    yield FullyShardedDataParallel, "__init__", build_fsdp
    # These refuse tensors of the host, or a GPU's number for them.
    for owner, name in (
        (DistributedDataParallel, "__init__"),
        (nn.DataParallel, "forward"),
        (nn.SyncBatchNorm, "forward"),
    ):
        yield owner, name, _all_on_cuda(shown, getattr(owner, name))
    yield torch.Tensor, "record_stream", _no_effect
    save: Any = torch.autograd.graph.save_on_cpu
    plain_save = save.__init__
    # C++ pins nothing without a GPU.
    yield save, "__init__", lambda hooks, *args, **kwargs: plain_save(hooks)
    plain_default = torch.set_default_device

    def set_default_device(device: Any) -> None:
        # It comes after every function mode, where nobody takes the GPU for the CPU.
        plain_default(_on_cpu(device))

    yield torch, "set_default_device", set_default_device
    for module in (torch, torch.serialization):
        yield module, "load", _load_to_cpu(module.load)


def _all_on_cuda(
    shown: _torch.ShownAsCuda, plain: Callable[..., Any]
) -> Callable[..., Any]:
    """Call a function that looks at devices; in a script for CPUs it sees these."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not shown.is_named:
            return plain(*args, **kwargs)
        with shown.all_shown():
            return plain(*args, **kwargs)

    return call


def _load_to_cpu(plain: Callable[..., Any]) -> Callable[..., Any]:
    def location(storage: Any, name: str) -> Any:
        return storage if name.startswith("cuda") else None

    @functools.wraps(plain)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if map_location is None:
            map_location = location
        elif isinstance(map_location, dict):
            map_location = {key: _on_cpu(value) for key, value in map_location.items()}
        else:
            map_location = _on_cpu(map_location)
        return plain(f, map_location, *args, **kwargs)

    return load


def _on_cpu(device: Any) -> Any:
    if isinstance(device, torch.device) and device.type == "cuda":
        return _CPU
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return "cpu"
    return device


# ----------------------------------------------------------------------------
# SyncBatchNorm is made of operators that torch has for GPUs only.


@contextlib.contextmanager
def _sync_batch_norm_kernels() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL", "CPU")
    try:
        library.impl("batch_norm_stats", _stats)
        library.impl("batch_norm_gather_stats_with_counts", _gather_stats)
        library.impl("batch_norm_elemt", _normalize)
        library.impl("batch_norm_backward_reduce", _backward_sums)
        library.impl("batch_norm_backward_elemt", _backward_input)
        yield
    finally:
        _torch.remove_library(library)


def _by_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One value a channel, to compute with a batch of its channels."""
    return values.view(1, -1, *[1] * (like.dim() - 2))


def _without_channels(batch: torch.Tensor) -> list[int]:
    return [dim for dim in range(batch.dim()) if dim != 1]


def _stats(batch: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    dims = _without_channels(batch)
    var, mean = torch.var_mean(batch.float(), dims, correction=0)
    return mean, torch.rsqrt(var + eps)


def _gather_stats(  # noqa: PLR0913, PLR0917  # torch's signature
    batch: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = (counts / counts.sum()).unsqueeze(1).to(mean.dtype)
    total_mean = (weights * mean).sum(0)
    variances = invstd.pow(-2) - eps
    total_var = (weights * (variances + (mean - total_mean) ** 2)).sum(0)
    if running_mean is not None:
        running_mean.lerp_(total_mean.to(running_mean.dtype), momentum)
    if running_var is not None:
        unbiased = total_var * (counts.sum() / (counts.sum() - 1))
        running_var.lerp_(unbiased.to(running_var.dtype), momentum)
    return total_mean, torch.rsqrt(total_var + eps)


def _normalize(
    batch: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    result = (batch - _by_channel(mean, batch)) * _by_channel(invstd, batch)
    if weight is not None:
        result = result * _by_channel(weight, batch)
    if bias is not None:
        result = result + _by_channel(bias, batch)
    return result.to(batch.dtype)


def _backward_sums(  # noqa: PLR0913, PLR0917  # torch's signature
    grad: torch.Tensor,
    batch: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[torch.Tensor, ...]:
    dims = _without_channels(batch)
    sum_grad = grad.float().sum(dims)
    sum_product = (grad * (batch - _by_channel(mean, batch))).sum(dims)
    of_weight, of_bias = sum_product * invstd, sum_grad.clone()
    if weight is not None:
        of_weight, of_bias = of_weight.to(weight.dtype), of_bias.to(weight.dtype)
    return sum_grad, sum_product, of_weight, of_bias


def _backward_input(  # noqa: PLR0913, PLR0917  # torch's signature
    grad: torch.Tensor,
    batch: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    sum_grad: torch.Tensor,
    sum_product: torch.Tensor,
    counts: torch.Tensor,
) -> torch.Tensor:
    number = counts.sum()
    centered = batch - _by_channel(mean, batch)
    slope = _by_channel(sum_product / number * invstd**2, batch)
    scale = invstd if weight is None else invstd * weight
    result = grad - _by_channel(sum_grad / number, batch) - centered * slope
    return (result * _by_channel(scale, batch)).to(batch.dtype)
