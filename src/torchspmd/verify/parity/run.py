"""Run a step on one device or on a rank, and record it: what check_parity compares."""

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchspmd import _torch
from torchspmd.errors import UsageError
from torchspmd.step import compile as compile_step
from torchspmd.verify.recording.layouts import Grid, cut
from torchspmd.verify.recording.recorder import Recorder, grid_of, record

# ----------------------------------------------------------------------------
# What this machine can hold: one model on one device, and how many ranks.

_RANK_BYTES = 400 << 20  # a process with torch loaded, and room for a small model
DOES_NOT_FIT = (
    "check_parity: the model does not fit one device ({reason}): check a smaller "
    "configuration of it (fewer layers, the same widths), or record two parallel layouts "
    "with torchspmd.verify.record and compare those with `torchspmd parity a b`."
)
_RANKS_PER_CORE = 16  # more only wait for each other


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the host or on a device."""
    text = str(error).lower()
    words = ("can't allocate memory", "out of memory", "cannot allocate memory")
    return isinstance(error, MemoryError) or any(word in text for word in words)


def explain_size(parameter_bytes: int, world_size: int) -> str | None:
    """One sentence on a model too large to train here; None if there is room for it.

    One device holds parameters, gradients and up to two states; every rank builds the
    whole model before it is laid out.
    """
    free = free_bytes()
    needed = parameter_bytes * max(4, world_size)
    if free is None or needed <= free:
        return None
    reason = (
        f"{parameter_bytes / 2**30:.3g} GiB of parameters, {free / 2**30:.3g} GiB free"
    )
    return DOES_NOT_FIT.format(reason=reason)


def explain_world(world_size: int) -> str | None:
    """One sentence on a world that is too large for this machine; None if it is not."""
    cores = os.cpu_count() or 1
    free = free_bytes()
    by_memory = world_size if free is None else max(1, free // _RANK_BYTES)
    most = min(by_memory, max(8, _RANKS_PER_CORE * cores))
    if world_size <= most:
        return None
    room = "" if free is None else f" and {free / 2**30:.1f} GiB of free memory"
    return (
        f"check_parity: {world_size} ranks are too many for this machine, which has "
        f"{cores} cores{room}, and can run {most}: a bug of {world_size} ranks nearly "
        "always shows at 4, or with a mesh like {'dp': 2, 'tp': 2}."
    )


def free_bytes() -> int | None:
    """Memory that processes may still take; None where the system does not say."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How ``check_parity`` runs a step; the defaults serve most.

    Attributes:
        seed: For the model, and for each step.
        split: ``split(batch, mesh)`` gives a rank's batch, where rows over the data axes
            are not the way.
        loss_reduction: How the losses along the data axes make the whole one.
        timeout: Seconds that the ranks may take.
        save: Keep both recordings in this folder, as ``one`` and ``many``.

    >>> RunOptions(timeout=60.0).seed
    0
    """

    seed: int = 0
    split: Callable[[Any, DeviceMesh], Any] | None = None
    loss_reduction: Literal["mean", "sum"] = "mean"
    timeout: float = 300.0
    save: str | os.PathLike[str] | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a rank needs to know; it is pickled."""

    build_model: Callable[[], nn.Module]
    step: Callable[..., Any]
    parallelize: Callable[..., Any] | None
    optimizer: Callable[[Any], torch.optim.Optimizer]
    compile: bool | Mapping[str, Any]
    mesh: Mapping[str, int]
    data_axes: tuple[str, ...]
    device_type: str
    dtype: torch.dtype | None
    options: RunOptions
    batches: tuple[Any, ...] = ()

    @property
    def sent(self) -> dict[str, Any]:
        """The user's own functions and values, by the name of their argument."""
        names = ("build_model", "step", "parallelize", "optimizer", "compile")
        given = {name: getattr(self, name) for name in names}
        return {**given, "split": self.options.split}

    @property
    def world_size(self) -> int:
        """How many ranks the mesh has."""
        return math.prod(self.mesh.values())


def run_reference(job: Job, folder: str) -> None:
    """The step on one device with the whole batch."""
    with _one_thread(), torch.random.fork_rng():
        model = _build(job)
        size = sum(p.nbytes for p in model.parameters())
        if job.device_type == "cpu" and (text := explain_size(size, job.world_size)):
            raise UsageError(text)
        optimizer = _optimizer(job, model)
        recorder = record(folder, model, optimizer)
        _train(job, _whole_step(job.step), recorder, model, optimizer, job.batches)


def run_rank(job: Job, folder: str) -> None:
    """The step on this rank with its part of the batch."""
    names = tuple(job.mesh)
    mesh = init_device_mesh(
        job.device_type, tuple(job.mesh.values()), mesh_dim_names=names
    )
    model = _build(job)
    if job.parallelize is not None:
        changed = job.parallelize(model, mesh)
        model = model if changed is None else changed
    optimizer = _optimizer(job, model)
    step = _whole_step(job.step)
    if job.compile:
        step = _compiled(job, step, mesh)
    batches = tuple(_own_part(job, batch, mesh) for batch in job.batches)
    recorder = record(
        folder,
        model,
        optimizer,
        mesh=mesh,
        data_axes=job.data_axes,
        loss_reduction=job.options.loss_reduction,
        modules=not job.compile,
    )
    _train(job, step, recorder, model, optimizer, batches)
    dist.barrier()  # a rank that is done must not take its sockets away


def _build(job: Job) -> nn.Module:
    torch.manual_seed(job.options.seed)
    model = job.build_model()
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"check_parity: build_model returned a {type(model).__name__}; it must return "
            "a new nn.Module."
        )
    return model.to(device=job.device_type, dtype=job.dtype)


def _optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    return job.optimizer([p for p in model.parameters() if p.requires_grad])


def _train(
    job: Job,
    step: Callable[..., Any],
    recorder: Recorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: tuple[Any, ...],
) -> None:
    with recorder:
        for number, batch in enumerate(batches):
            torch.manual_seed(job.options.seed + 1 + number)
            result = step(model, optimizer, batch)
            recorder.end_step(*_loss_of(result))


def _whole_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step with backward and update, also where the user gave the loss alone."""
    if is_whole_step(step):
        return step

    def loss_and_update(model: nn.Module, optim: Any, batch: Any) -> Any:
        result = step(model, batch)
        _loss_of(result)[0].backward()
        optim.step()
        optim.zero_grad()
        return result

    return loss_and_update


def is_whole_step(step: Callable[..., Any]) -> bool:
    """Whether a step takes an optimizer too, and not only ``(model, batch)``."""
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return sum(parameter.kind in positional for parameter in parameters) != 2


def _loss_of(result: Any) -> tuple[Any, Any]:
    """The loss, and whatever else a step returned."""
    if isinstance(result, torch.Tensor):
        return result, None
    if isinstance(result, Mapping) and isinstance(result.get("loss"), torch.Tensor):
        return result["loss"], {k: v for k, v in result.items() if k != "loss"}
    if isinstance(result, tuple) and result and isinstance(result[0], torch.Tensor):
        return result[0], result[1:]
    raise UsageError(
        f"check_parity: step returned {type(result).__name__}; return the loss, "
        "(loss, outputs), or a dict with 'loss', as tensors."
    )


def _compiled(
    job: Job, step: Callable[..., Any], mesh: DeviceMesh
) -> Callable[..., Any]:
    options = dict(job.compile) if isinstance(job.compile, Mapping) else {}
    if isinstance(options.get("mesh"), str):
        options["mesh"] = mesh[options["mesh"]]
    return compile_step(**options)(step)


def _own_part(job: Job, batch: Any, mesh: DeviceMesh) -> Any:
    if job.options.split is not None:
        return job.options.split(batch, mesh)
    grid = grid_of(mesh)
    layout = tuple("S(0)" if name in job.data_axes else "R" for name in grid.names)
    return _torch.map_tree(lambda leaf: _part(leaf, grid, layout), batch)


def _part(leaf: Any, grid: Grid, layout: tuple[str, ...]) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.ndim == 0:
        return leaf
    return cut(leaf.cpu(), grid, layout, dist.get_rank()).to(leaf.device)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """As on the ranks: the same kernels add in the same order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
