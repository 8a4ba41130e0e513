"""Process groups, their meshes and their stores; DDP on fake groups."""

import contextlib
import functools
import gc
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

# torch's annotations do not export its private names, and stores are made in C++.
_c10d: Any = c10d
_dist: Any = dist
Store: TypeAlias = Any


def resolve_group(value: Any) -> dist.ProcessGroup | None:
    """The process group behind an operator's argument: a name, a boxed or plain group."""
    if isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, str):
        return _group(_c10d._resolve_process_group(value))
    if isinstance(value, torch.ScriptObject):
        return _group(dist.ProcessGroup.unbox(value))
    return None


def uses_gloo(group_name: str, device: torch.device) -> bool:
    """Whether gloo makes a group's collectives of tensors on a device."""
    group: Any = _c10d._resolve_process_group(group_name)
    return str(group._get_backend(device).name()) == "gloo"


def find_group(tag: Any, ranks: Any) -> dist.ProcessGroup | None:
    """The process group of these ranks, as the legacy functional operators name it."""
    return _c10d._find_pg_by_ranks_and_tag(tag, list(ranks))


def _group(value: Any) -> dist.ProcessGroup:
    assert isinstance(value, dist.ProcessGroup), type(value)
    return value


_MESH_NAMES = vars(sys.modules[DeviceMesh.__module__])


def live_meshes() -> list[DeviceMesh]:
    """Every DeviceMesh alive in this process; torch keeps no list of them.

    The garbage collector knows them by their class, but for those that were there at a
    ``gc.freeze()``. Of these, the ones are found that are in use: running functions of
    torch hold the module, DTensor or group of parameters that communicates.
    """
    referrers = gc.get_referrers(DeviceMesh)
    found = [each for each in referrers if _is_mesh(each)]
    # Not gc.get_freeze_count(), which walks through all that is frozen: the namespace of
    # torch's own module was there before any mesh, and is not found either once frozen.
    if not any(each is _MESH_NAMES for each in referrers):
        known = set(map(id, found))
        found += [mesh for mesh in _meshes_in_use() if id(mesh) not in known]
    return found


def _is_mesh(value: object) -> bool:
    # Not isinstance: torch's metaclass asks objects for attributes, and some warn.
    return issubclass(type(value), DeviceMesh)


def _meshes_in_use() -> Iterator[DeviceMesh]:
    """Meshes that running functions of torch and ours hold, directly or not.

    Functions of the user's are left out: reading their variables would keep these alive
    until they return (before Python 3.13). Classes, modules and globals are not followed,
    since all of torch hangs on them.
    """
    seen: set[int] = set()
    pending: list[Any] = [
        frame.f_locals
        for frame, _ in traceback.walk_stack(sys._getframe(1))
        if str(frame.f_globals.get("__name__")).startswith(("torch.", "torchspmd."))
    ]
    while pending:
        value = pending.pop()
        if id(value) in seen or not gc.is_tracked(value):
            continue
        seen.add(id(value))
        if _is_mesh(value):
            yield value
        if issubclass(type(value), FunctionType):
            pending += (value.__closure__, value.__defaults__, value.__dict__)
        elif not issubclass(type(value), (type, ModuleType)):
            pending += gc.get_referents(value)


def owned_axis(mesh: DeviceMesh, process_group: dist.ProcessGroup) -> str | None:
    """The name of the mesh axis whose group this is; None when it is not the mesh's."""
    axes = mesh.mesh_dim_names or ()
    names = [str(name) for name in getattr(mesh, "_dim_group_names", ())]
    if process_group.group_name not in names or len(axes) != len(names):
        return None
    # Names come again in a new world, and a mesh of an old one may still be alive.
    root: Any = mesh._get_root_mesh()
    registry = getattr(root, "_pg_registry", {})
    if registry.get(process_group.group_name, process_group) is not process_group:
        return None
    return axes[names.index(process_group.group_name)]


def described_axis(process_group: dist.ProcessGroup) -> str | None:
    """The name of the axis that a mesh made this group for, whether it lives or not."""
    made_for, _, axis = process_group.group_desc.partition("mesh_")
    # What a mesh without names writes there, and one that shares the group of all ranks.
    is_unnamed = axis == "default" or axis.removeprefix("dim_").isdecimal()
    return None if made_for or not axis or is_unnamed else axis


def root_ranks(mesh: DeviceMesh) -> list[int]:
    """All ranks of the mesh that a mesh is an axis or a part of."""
    root: Any = mesh._get_root_mesh()
    return [int(rank) for rank in root.mesh.flatten().tolist()]


def default_store() -> Store:
    """The store of the default process group; holding it keeps its server alive."""
    return _c10d._get_default_store()


@contextlib.contextmanager
def ddp_on_fake_groups() -> Iterator[None]:
    """Let DistributedDataParallel run on a fake group while this is open.

    Its reducer reads the reduced bucket from the work's future, which a fake group
    leaves empty. A communication hook that reduces and hands the bucket back does the
    same work; a hook of the user's own is left alone.
    """
    ddp: Any = DistributedDataParallel
    plain_forward = ddp.forward

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not module._comm_hooks:
            module.register_comm_hook(module.process_group, _reduce_bucket)
        return plain_forward(module, *args, **kwargs)

    ddp.forward = forward
    try:
        yield
    finally:
        ddp.forward = plain_forward


@contextlib.contextmanager
def gathers_of_any_shape() -> Iterator[None]:
    """A fake group gathers into one tensor by elements, as others do, and not by rows."""
    kind: Any = dist.ProcessGroup
    names = ("_allgather_base", "all_gather_single")  # one function, by torch's version
    plain = {name: getattr(kind, name) for name in names if hasattr(kind, name)}

    def flat(function: Any) -> Any:
        def gather(group: Any, output: Any, input: Any, *args: Any, **more: Any) -> Any:
            if output.dim() and output.size(0) % group.size():
                output, input = output.view(-1), input.view(-1)
            return function(group, output, input, *args, **more)

        return gather

    for name, function in plain.items():
        setattr(kind, name, flat(function))
    try:
        yield
    finally:
        for name, function in plain.items():
            setattr(kind, name, function)


@contextlib.contextmanager
def ddp_without_values() -> Iterator[None]:
    """DistributedDataParallel does not compare the shapes of ranks, which reads memory."""
    plain = _dist._verify_params_across_processes
    _dist._verify_params_across_processes = lambda *args: None
    try:
        yield
    finally:
        _dist._verify_params_across_processes = plain


def is_first_ddp_step(module: torch.nn.Module) -> bool:
    """Whether a module is DistributedDataParallel and its first forward is about to run."""
    return isinstance(module, DistributedDataParallel) and not module._lazy_init_ran


def has_first_buckets(model: torch.nn.Module) -> bool:
    """Whether DistributedDataParallel in it still sends all gradients at once.

    With ``static_graph=True`` it makes its buckets in the third step.
    """
    return any(
        isinstance(each, DistributedDataParallel)
        and each.static_graph
        and not each._has_rebuilt_buckets
        for each in model.modules()
    )


# DDP insists on its own class as the bucket's annotation, or on none.
def _reduce_bucket(group, bucket):  # type: ignore[no-untyped-def]
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)  # as DDP does
    work.get_future()  # whose reducer waits for it at the end of backward
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def file_store(path: Path, world_size: int) -> Store:
    """A store in a file, for ranks of one machine: no port to collide on."""
    return _dist.FileStore(str(path), world_size)


def fake_store() -> Store:
    """A store for the fake backend, whose collectives return at once.

    Importing the module registers the backend.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


_private_lock = threading.RLock()
_private_open: set[str] = set()


@contextlib.contextmanager
def private_mesh(size: int) -> Iterator[DeviceMesh]:
    """A mesh of one axis that this process plays rank 0 of, for tensors without values.

    No default process group is needed, made or changed: torch knows the group by its
    name, and only while this is open.
    """
    mesh, group = _private_mesh(size)
    name = group.group_name
    with _private_lock:
        if name in _private_open:
            yield mesh
            return
        _c10d._register_process_group(name, group)
        _private_open.add(name)
        try:
            yield mesh
        finally:
            _private_open.remove(name)
            torch._C._distributed_c10d._unregister_process_group(name)


@functools.cache
def _private_mesh(size: int) -> tuple[Any, Any]:
    """The mesh and its group; one for each size, since DTensor remembers meshes.

    What it remembers of a mesh, it uses for equal ones: so this one equals no other.
    """
    from torch.testing._internal.distributed import fake_pg

    place = SimpleNamespace(group_rank=0, group_size=size)
    fake: Any = torch._C._distributed_c10d.FakeProcessGroup
    backend = fake_pg._create_fake_pg(place, fake.Options())
    group: Any = dist.ProcessGroup(fake_store(), 0, size)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), kind, backend)
    name = f"torchspmd private {size}"
    group._set_group_name(name)
    mesh: Any = DeviceMesh(
        "cpu", torch.arange(size), mesh_dim_names=(name,), _init_backend=False, _rank=0
    )
    mesh._dim_group_names = [name]
    return mesh, group


def work_types() -> tuple[type[Any], ...]:
    """The classes of works that Python waits for: the fake backend's has its own wait."""
    fake = getattr(torch._C._distributed_c10d, "FakeWork", None)
    types = (_dist.Work, fake) if fake is not None else (_dist.Work,)
    return tuple(each for each in types if "wait" in vars(each))


def num_unwaited() -> int:
    """How many functional collectives were started and never waited for."""
    return int(torch._C._distributed_c10d._get_work_registry_size())
