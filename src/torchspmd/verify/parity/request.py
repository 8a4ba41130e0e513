"""The arguments of check_parity, judged before anything runs."""

import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torchspmd import _torch
from torchspmd.errors import UsageError, WorldError
from torchspmd.testing import Ranks
from torchspmd.verify.parity.limits import explain_world
from torchspmd.verify.parity.run import Job

# Axes whose ranks get different rows by default.
DATA_AXES = frozenset(
    ("dp", "ddp", "fsdp", "data", "dp_replicate", "dp_shard", "replicate")
)

# Arguments that go to the ranks as they are.
_SENT = ("build_model", "step", "parallelize", "optimizer", "split", "compile")


@dataclass(frozen=True, slots=True)
class Request:
    """How the caller asked for the world."""

    world_size: int | None
    mesh: Mapping[str, int] | None
    data_axes: Sequence[str] | None
    steps: int
    ranks: Ranks | None


def build_job(request: Request, **given: Any) -> Job:
    """What is sent to the ranks; every problem of the arguments in one error."""
    if dist.is_initialized():
        raise WorldError(
            "check_parity starts its own ranks, and this process has a process group "
            "already. In a job under torchrun use torchspmd.verify.record, and compare "
            "with `torchspmd parity`."
        )
    mesh = _mesh(request, is_compiled=bool(given["compile"]))
    data_axes = _data_axes(request, mesh, given)
    sent = {name: given[name] for name in _SENT}
    problems = [*_problems(request, mesh, data_axes), *travel_problems(sent)]
    if problems:
        raise UsageError("check_parity: " + "; ".join(problems) + ".")
    if request.ranks is None and (text := explain_world(math.prod(mesh.values()))):
        raise UsageError(text)
    device = "cuda" if request.ranks and request.ranks.backend == "nccl" else "cpu"
    batch, dtype = given.pop("batch"), given["dtype"]
    batches = _batches(batch, request.steps, dtype, device)
    if given["split"] is None:
        _check_rows(batches[0], mesh, data_axes)
    return Job(
        batches=batches, mesh=mesh, data_axes=data_axes, device_type=device, **given
    )


def _mesh(request: Request, *, is_compiled: bool) -> dict[str, int]:
    if request.mesh is not None:
        return dict(request.mesh)
    known = request.ranks.world_size if request.ranks is not None else 4
    size = known if request.world_size is None else request.world_size
    return {"dp" if is_compiled else "ranks": size}


def _data_axes(
    request: Request, mesh: Mapping[str, int], given: Mapping[str, Any]
) -> tuple[str, ...]:
    if request.data_axes is not None:
        return tuple(request.data_axes)
    return tuple(name for name in mesh if name in DATA_AXES)


def _problems(
    request: Request, mesh: Mapping[str, int], data_axes: tuple[str, ...]
) -> list[str]:
    found = []
    size = math.prod(mesh.values())
    if not mesh or any(not isinstance(n, int) or n < 1 for n in mesh.values()):
        found.append(f"mesh={dict(mesh)}: every axis needs at least one rank")
    elif request.world_size is not None and request.world_size != size:
        found.append(f"world_size={request.world_size}, but the mesh has {size} ranks")
    elif request.ranks is not None and request.ranks.world_size != size:
        found.append(
            f"ranks has {request.ranks.world_size} ranks, but the mesh has {size}"
        )
    if request.steps < 1:
        found.append(f"steps={request.steps}: at least one step is needed")
    unknown = [axis for axis in data_axes if axis not in mesh]
    if unknown:
        found.append(
            f"data_axes={data_axes}: the mesh {dict(mesh)} has no axis "
            f"{', '.join(unknown)}"
        )
    return found


def travel_problems(given: Mapping[str, Any]) -> list[str]:
    """Functions, by the argument's name, that pickle cannot send to another process."""
    found = []
    for name, value in given.items():
        try:
            pickle.dumps(value)
        except Exception:
            called = getattr(value, "__qualname__", type(value).__name__)
            found.append(
                f"{name} ({called}) cannot be sent to the ranks: define it with `def` at "
                "the top level of a module, or use functools.partial of such a function"
            )
    return found


def _batches(
    batch: Any, steps: int, dtype: torch.dtype | None, device: str
) -> tuple[Any, ...]:
    is_function = isinstance(batch, Callable) and not isinstance(batch, torch.Tensor)  # type: ignore[arg-type]
    whole = [batch(number) if is_function else batch for number in range(steps)]
    return tuple(_converted(each, dtype, device) for each in whole)


def _converted(batch: Any, dtype: torch.dtype | None, device: str) -> Any:
    leaves, structure = _torch.flatten_tree(batch)
    moved = [
        leaf.detach().to(device, dtype if leaf.is_floating_point() else None)
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    return _torch.unflatten_tree(moved, structure)


def _check_rows(batch: Any, mesh: Mapping[str, int], axes: tuple[str, ...]) -> None:
    size = math.prod(mesh[axis] for axis in axes)
    uneven = {
        leaf.shape[0]
        for leaf in _torch.flatten_tree(batch)[0]
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] % size
    }
    if uneven:
        raise UsageError(
            f"check_parity: a batch of {min(uneven)} rows cannot be split evenly over "
            f"{size} ranks of {' and '.join(map(repr, axes))}, and a mean over uneven "
            f"parts is another mean: give a multiple of {size} rows, or split=."
        )
