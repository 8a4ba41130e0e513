"""Every private torch name and version-dependent fact that torchspmd rests on.

No other file may touch ``torch._*`` or a private module of torch;
``tests/unit/test_torch_names.py`` checks each name here on the installed version.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any, TypeAlias

import torch
import torch.autograd
import torch.distributed as dist
from torch._guards import TracingContext
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

# torch's annotations do not export its private names, and `dist.Store` is made in C++.
_c10d: Any = c10d
_dist: Any = dist
_autograd: Any = torch.autograd
Store: TypeAlias = Any

# --- autograd: which node of the backward graph is running ---------------------------


def sequence_number() -> int:
    """The number that the next autograd node created by this thread will get."""
    return int(_autograd._get_sequence_nr())


def graph_task() -> int:
    """The id of the backward pass that this thread works on; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def current_node() -> Any | None:
    """The autograd node whose backward runs now in this thread."""
    return torch._C._current_autograd_node()


def node_sequence(node: Any) -> int:
    """The sequence number under which a node was created."""
    return int(node._sequence_nr())


# --- the dispatcher: see an operator run without a dispatch mode ----------------------

# BackendSelect is in every call's key set, just below the Python key: a kernel there is
# reached from eager code, from inside DTensor and fake tensors, from C++ (DDP's
# reducer), from compiled graphs and from any thread, and other operators do not pay.
_OBSERVED_KEY = torch._C.DispatchKey.BackendSelect
_BELOW = torch._C._dispatch_keyset_full_after(_OBSERVED_KEY)

Kernel = Callable[..., Any]


def registered_operators(
    namespaces: tuple[str, ...],
) -> Iterator[torch._ops.OpOverload]:
    """Every operator overload that torch knows now in these namespaces."""
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace in namespaces:
            base, _, overload = name.partition(".")
            packet = getattr(getattr(torch.ops, namespace), base)
            yield getattr(packet, overload or "default")


def observe(kernels: dict[torch._ops.OpOverload, Kernel]) -> Callable[[], None]:
    """Run each kernel in front of its operator; return the function that undoes it.

    A kernel is called as ``kernel(keyset, *args, **kwargs)`` and goes on with
    ``call_below``.
    """
    libraries: dict[str, torch.library.Library] = {}
    key = _OBSERVED_KEY.name
    for op, kernel in kernels.items():
        namespace, _, name = op.name().partition("::")
        library = libraries.get(namespace)
        if library is None:
            library = torch.library.Library(namespace, "IMPL", key)
            libraries[namespace] = library
        library.impl(name, kernel, key, with_keyset=True)

    def undo() -> None:
        for library in libraries.values():
            library._destroy()

    return undo


def call_below(
    op: torch._ops.OpOverload, keyset: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Go on with an operator below an observing kernel."""
    return op.redispatch(keyset & _BELOW, *args, **kwargs)


def packet_name(op: torch._ops.OpOverload) -> str:
    """``namespace::name`` of an operator, without its overload."""
    return op._schema.name


def argument_names(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of an operator's arguments, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


# --- compilation ----------------------------------------------------------------------


def is_tracing_for_compile() -> bool:
    """Whether torch.compile is tracing in this thread, so that nothing really runs."""
    return TracingContext.try_get() is not None


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether calling a module runs code made by torch.compile."""
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


_replay_callbacks: list[Callable[[], None]] = []


def on_graph_replay(callback: Callable[[], None]) -> Callable[[], None]:
    """Call back at each replay of a CUDA graph; return the function that undoes it.

    A replay launches kernels without calling operators, so nothing else can see it.
    """
    graph_class: Any = torch.cuda.CUDAGraph
    if not _replay_callbacks:
        replay = graph_class.replay

        def observed_replay(graph: Any) -> None:
            for each in _replay_callbacks:
                each()
            replay(graph)

        observed_replay.original = replay  # type: ignore[attr-defined]
        graph_class.replay = observed_replay
    _replay_callbacks.append(callback)

    def undo() -> None:
        _replay_callbacks.remove(callback)
        if not _replay_callbacks:
            graph_class.replay = graph_class.replay.original

    return undo


# --- process groups -------------------------------------------------------------------


def resolve_group(value: Any) -> dist.ProcessGroup | None:
    """The process group behind an operator's argument: a name, a boxed or plain group."""
    if isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, str):
        return _group(_c10d._resolve_process_group(value))
    if isinstance(value, torch.ScriptObject):
        return _group(dist.ProcessGroup.unbox(value))
    return None


def _group(value: Any) -> dist.ProcessGroup:
    assert isinstance(value, dist.ProcessGroup), type(value)
    return value


def live_meshes() -> list[DeviceMesh]:
    """Every DeviceMesh alive in this process; torch keeps no list of them."""
    return [
        mesh for mesh in gc.get_referrers(DeviceMesh) if isinstance(mesh, DeviceMesh)
    ]


def mesh_group_names(mesh: DeviceMesh) -> list[str]:
    """The names of the groups that a mesh owns, one for each axis; empty before init."""
    return [str(name) for name in getattr(mesh, "_dim_group_names", ())]


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


def _reduce_bucket(
    group: dist.ProcessGroup, bucket: Any
) -> torch.futures.Future[torch.Tensor]:
    dist.all_reduce(bucket.buffer(), group=group)
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


# --- landmarks: functions of torch that tell what a call stack is doing ----------------


class Landmark:
    """Names for what a frame of torch's own code means to the frames inside it."""

    MODULE_CALL = "module call"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    OPTIMIZER = "optimizer"
    MODULE_HOOK = "module backward hook"
    FSDP = "fsdp parameter group"
    DISPATCH = "dtensor dispatch"
    REDISTRIBUTE = "dtensor redistribute"
    COMPILED = "compiled region"


# (end of the file's path, function name or None for all of the file) -> meaning
LANDMARKS: dict[tuple[str, str | None], str] = {
    ("torch/nn/modules/module.py", "_call_impl"): Landmark.MODULE_CALL,
    ("torch/autograd/graph.py", "_engine_run_backward"): Landmark.BACKWARD,
    ("torch/utils/checkpoint.py", "unpack_hook"): Landmark.RECOMPUTE,
    ("torch/utils/checkpoint.py", "recompute_fn"): Landmark.RECOMPUTE,
    ("torch/utils/checkpoint.py", "backward"): Landmark.RECOMPUTE,
    ("torch/optim/optimizer.py", "wrapper"): Landmark.OPTIMIZER,
    ("torch/nn/utils/clip_grad.py", None): Landmark.OPTIMIZER,
    ("torch/amp/grad_scaler.py", None): Landmark.OPTIMIZER,
    ("torch/utils/hooks.py", "hook"): Landmark.MODULE_HOOK,
    ("torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py", None): Landmark.FSDP,
    (
        "torch/distributed/tensor/_dispatch.py",
        "redistribute_local_args",
    ): Landmark.DISPATCH,
    (
        "torch/distributed/tensor/_redistribute.py",
        "redistribute_local_tensor",
    ): Landmark.REDISTRIBUTE,
    ("torch/_functorch/_aot_autograd/runtime_wrappers.py", None): Landmark.COMPILED,
}

_TORCH_FOLDER = torch.__file__.removesuffix("__init__.py")


def landmark(code: CodeType) -> str | None:
    """What a function of torch means to the frames inside it; None for most."""
    path = code.co_filename.replace("\\", "/")
    if not code.co_filename.startswith(_TORCH_FOLDER):
        return None
    inside = "torch/" + path[len(_TORCH_FOLDER) :]
    return LANDMARKS.get((inside, code.co_name)) or LANDMARKS.get((inside, None))


def is_torch_code(code: CodeType) -> bool:
    """Whether a function is torch's own, or made by it."""
    name = code.co_filename
    return name.startswith((_TORCH_FOLDER, "<")) or "torchinductor" in name


def fsdp_module(local_names: dict[str, Any]) -> torch.nn.Module | None:
    """The module that an FSDP2 parameter group belongs to, from one of its frames."""
    group = local_names.get("self")
    modules = getattr(group, "modules", None)
    return modules[0] if modules else None


def hooked_module(local_names: dict[str, Any]) -> torch.nn.Module | None:
    """The module whose full backward hook runs, from the frame that calls the hook."""
    return getattr(local_names.get("self"), "module", None)


def redistribution(local_names: dict[str, Any]) -> str | None:
    """``Shard(0) -> Replicate`` from the frame of a DTensor redistribution."""
    current, target = local_names.get("current_spec"), local_names.get("target_spec")
    if current is None or target is None:
        return None
    return f"{_layout(current.placements)} -> {_layout(target.placements)}"


def redistributed_operator(local_names: dict[str, Any]) -> str | None:
    """The operator for which DTensor's dispatch redistributes an operand."""
    schema = local_names.get("suggested_input_schema")
    return str(schema.op) if schema is not None else None


def _layout(placements: tuple[Any, ...]) -> str:
    names = [str(placement) for placement in map(_placement, placements)]
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


def _placement(placement: Any) -> str:
    if placement.is_shard():
        return f"Shard({placement.dim})"
    return "Replicate" if placement.is_replicate() else "Partial"
