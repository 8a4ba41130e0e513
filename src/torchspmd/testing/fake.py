"""Any world size in this one process: shapes, layouts and counts without values."""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchspmd import _torch
from torchspmd.errors import UsageError, WorldError


@contextlib.contextmanager
def fake_mesh(
    shape: int | Sequence[int],
    names: Sequence[str] | None = None,
    *,
    rank: int = 0,
    device_type: str = "cpu",
) -> Iterator[DeviceMesh]:
    """A mesh of any size in this one process; collectives return at once.

    Shapes, layouts and counts are those of a real run, values are not. Also works as a
    decorator.

    Args:
        shape: Size of each mesh axis.
        names: Name of each axis, such as ``("dp", "tp")``.
        rank: Which rank this process plays.
        device_type: Where tensors of the mesh live.

    Example:
        >>> with fake_mesh((2, 4), ("dp", "tp")) as mesh:
        ...     mesh["tp"].size()
        4
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    world_size = math.prod(sizes)
    _check_fake_mesh(sizes, names, rank, world_size)
    with fake_world(world_size, rank=rank):
        mesh = init_device_mesh(
            device_type, sizes, mesh_dim_names=tuple(names) if names else None
        )
        yield mesh  # held here: the caller may not bind it


@contextlib.contextmanager
def fake_world(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """A default process group of any size in this one process, gone again at the end.

    >>> with fake_world(64, rank=3):
    ...     dist.get_rank(), dist.get_world_size()
    (3, 64)
    """
    if dist.is_initialized():
        raise WorldError(
            f"a fake world of {world_size} ranks cannot start: this process already has "
            f"a default process group of {dist.get_world_size()} ranks. "
            "Call torch.distributed.destroy_process_group() first."
        )
    dist.init_process_group(
        "fake", store=_torch.fake_store(), rank=rank, world_size=world_size
    )
    try:
        with _torch.ddp_on_fake_groups(), _torch.gathers_of_any_shape():
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _check_fake_mesh(
    sizes: tuple[int, ...], names: Sequence[str] | None, rank: int, world_size: int
) -> None:
    problems = []
    if not sizes or any(size < 1 for size in sizes):
        problems.append(f"shape {sizes}: every axis needs at least one rank")
    elif not 0 <= rank < world_size:
        problems.append(
            f"rank {rank}: the ranks of this mesh are 0 to {world_size - 1}"
        )
    if isinstance(names, str):
        problems.append(f"names {names!r}: pass a tuple of names, ({names!r},)")
    elif names is not None and len(names) != len(sizes):
        problems.append(f"names {tuple(names)}: the mesh has {len(sizes)} axes")
    if problems:
        raise UsageError("fake_mesh: " + "; ".join(problems) + ".")
