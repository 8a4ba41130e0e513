"""DTensor from the inside: shards in, shards out, no dispatch; plain collectives."""

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

from torchspmd._torch.groups import uses_gloo

if TYPE_CHECKING:  # it takes longer to import than the rest of torchspmd
    from torch.distributed.tensor import DTensor, Placement

_functional_ops = torch.ops._c10d_functional


# Before torch 2.13, what in-place operators on lists write into partial values is lost, and
# not refused.
LOSES_WRITES_OF_LISTS = torch.__version__ < "2.13"


def local_tensor(tensor: "DTensor") -> torch.Tensor:
    """This rank's shard, the object itself, with no autograd history of its own."""
    return tensor._local_tensor


def spec(tensor: "DTensor") -> Any:
    """Mesh, placements, global shape, stride and dtype of a DTensor, as one object."""
    return tensor._spec


def build_spec(
    mesh: DeviceMesh,
    placements: "tuple[Placement, ...]",
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Any:
    """A spec for ``wrap_local``; the global tensor is taken as contiguous."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    meta = TensorMeta(torch.Size(shape), tuple(reversed(stride)), dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def wrap_local(
    local: torch.Tensor, spec: Any, requires_grad: bool = False
) -> torch.Tensor:
    """A DTensor around a shard: 1 us, where ``DTensor.from_local`` takes 26."""
    return _new_dtensor(_dtensor_class(), local, spec, requires_grad=requires_grad)


_new_dtensor: Any = torch.Tensor._dtensor__new__


@functools.cache
def _dtensor_class() -> "type[DTensor]":
    from torch.distributed.tensor import DTensor

    return DTensor


def is_autocast_enabled() -> bool:
    """Whether autocast is on for any device type; cheaper than asking for one."""
    return bool(torch._C._is_any_autocast_enabled())


def current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost ``with mesh:``; None outside of one."""
    from torch.distributed.device_mesh import _mesh_resources

    try:
        return _mesh_resources.get_current_mesh()
    except RuntimeError:
        return None


# Collectives on plain tensors.

# In eager mode these run below autograd: the functional operators have a Python autograd
# kernel that costs more than the collective's own host time. Callers give autograd a
# backward of their own.
_BelowAutograd: Any = torch._C._AutoDispatchBelowAutograd


def _run(op: Any, *args: Any) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return op(*args)
    with _BelowAutograd():
        result: torch.Tensor = op(*args)
    return result


def start_all_reduce(tensor: torch.Tensor, op: str, group: str) -> torch.Tensor:
    """Start to reduce a tensor in place; ``wait`` for the returned tensor."""
    # A captured step has no functional form for the operator that writes in place.
    if torch.compiler.is_compiling() or type(tensor) is not torch.Tensor:
        return _run(_functional_ops.all_reduce.default, tensor, op, group)
    return _run(_functional_ops.all_reduce_.default, tensor, op, group)


def gather_now(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Gather along dim 0 and wait; while tracing, as two operators."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    is_eager = is_plain and not torch.compiler.is_compiling()
    if not is_eager or not tensor.ndim or not uses_gloo(group, tensor.device):
        op = _functional_ops.all_gather_into_tensor.default
        return wait(_run(op, tensor, size, group))
    # Without memory that is given to it, gloo's gather can corrupt the heap.
    memory = tensor.new_empty((size * tensor.shape[0], *tensor.shape[1:]))
    op = _functional_ops.all_gather_into_tensor_out.default
    with _BelowAutograd():
        wait(op(_as_sent(tensor), size, group, out=_as_sent(memory)))
    return memory


def _as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that gloo knows."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor


def start_reduce_scatter(tensor: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Start to sum and scatter along dim 0; ``wait`` for the returned tensor."""
    op = _functional_ops.reduce_scatter_tensor.default
    return _run(op, tensor, "sum", size, group)


def start_all_to_all(
    tensor: torch.Tensor, receive: list[int], send: list[int], group: str
) -> torch.Tensor:
    """Start to exchange rows along dim 0; ``wait`` for the returned tensor."""
    op = _functional_ops.all_to_all_single.default
    return _run(op, tensor, receive, send, group)


def wait(tensor: torch.Tensor) -> torch.Tensor:
    """Wait for a started collective; the result may be used after this."""
    return _run(_functional_ops.wait_tensor.default, tensor)


def apply_torch_style(
    style: Any, module: torch.nn.Module, mesh: DeviceMesh, src_data_rank: int | None
) -> torch.nn.Module:
    """Apply one of torch's own styles, on a copy: torch writes to the style."""
    style = copy.copy(style)
    style.src_data_rank = src_data_rank
    return style._apply(module, mesh)


def foreach_norm(tensors: list[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """The norm of each tensor, in one call for all of one device and dtype."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.device, tensor.dtype), []).append(place)
    norms: dict[int, torch.Tensor] = {}
    for group in places.values():
        found = torch._foreach_norm([tensors[place] for place in group], norm_type)
        norms.update(zip(group, found, strict=True))
    return [norms[place] for place in range(len(tensors))]


# ----------------------------------------------------------------------------
# Parameters and their shards: versions, views, layouts over two axes.


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written in place; views and detached twins count too."""
    return int(tensor._version)


def is_view(operator: Any) -> bool:
    """Whether an operator looks at its argument's memory in another shape."""
    return isinstance(operator, OpOverload) and bool(operator.is_view)


def sister_axis(mesh: DeviceMesh, other: DeviceMesh) -> DeviceMesh | None:
    """``other``, if it is another axis of the mesh that ``mesh`` is an axis of.

    The axis of the living mesh: DTensor may hand out an equal one of a world that is gone,
    from its cache.
    """
    held: Any = mesh
    root = held._get_root_mesh()
    name = (other.mesh_dim_names or ("",))[0]
    if name in (mesh.mesh_dim_names or ()) or name not in (root.mesh_dim_names or ()):
        return None
    axis: DeviceMesh = root[name]
    return axis if axis == other else None


def join_axes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """The mesh that has two axes of one mesh."""
    maker: Any = DeviceMesh
    return maker._concatenate([first, second])


def flatten_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """One axis over all ranks of a mesh; a mesh of one axis as it is."""
    held: Any = mesh
    return mesh if mesh.ndim == 1 else held._flatten()


def strided_shard(dim: int, num_parts: int) -> Any:
    """The placement of an axis that cuts each of the parts that a later axis makes."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard(dim, split_factor=num_parts)


def free_shard(tensor: torch.Tensor) -> None:
    """Give the memory of a DTensor's shard back; the DTensor has no values after this."""
    held: Any = tensor
    held._local_tensor = held._local_tensor.detach().new_empty(0)


@functools.cache
def share_memory_of_shards() -> None:
    """Let ``share_memory_`` of a DTensor share its shard, and ``is_shared`` tell of it.

    A DTensor has no memory of its own: torch copies from address 0, and the process ends.
    """
    from torch.distributed.tensor import DTensor

    def share_memory_(tensor: Any) -> Any:
        tensor._local_tensor.share_memory_()
        return tensor

    def is_shared(tensor: Any) -> bool:
        return bool(tensor._local_tensor.is_shared())

    for method in (share_memory_, is_shared):
        if method.__name__ not in vars(DTensor):  # a later torch may have its own
            setattr(DTensor, method.__name__, method)


# ----------------------------------------------------------------------------
# Attention of DTensors on CPU: torch has a strategy for it on GPUs only.


@functools.cache
def register_attention_on_cpu() -> None:
    """Let DTensor compute attention on CPU with batch or heads sharded, as on GPUs."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    aten = torch.ops.aten
    name = "_scaled_dot_product_flash_attention_for_cpu"
    # Results and tensors among the arguments have one layout.
    for op, num_results, num_tensors in ((name, 2, 3), (f"{name}_backward", 3, 6)):

        def strategies(
            *args: Any, results: int = num_results, tensors: int = num_tensors, **_: Any
        ) -> list[tuple[list[Any], list[Any]]]:
            others = [None] * (len(args) - tensors)
            return [
                ([layout] * results, [layout] * tensors + others)
                for layout in (Replicate(), Shard(0), Shard(1))
            ]

        register_sharding(getattr(aten, op).default)(strategies)


@contextlib.contextmanager
def layouts_by_value() -> Iterator[None]:
    """Let DTensor compute where shards begin with tensors that have values.

    It makes tensors of indices and reads them, also while fake tensors are traced.
    """
    from torch.distributed.tensor import _utils, placement_types

    owners: tuple[tuple[Any, str], ...] = (
        (_utils, "_compute_local_shape_and_global_offset"),
        (placement_types._StridedShard, "local_shard_size_and_offset"),
    )
    found = [(owner, name) for owner, name in owners if name in vars(owner)]
    before = [vars(owner)[name] for owner, name in found]
    for (owner, name), own in zip(found, before, strict=True):
        setattr(owner, name, _with_values(own))
    try:
        yield
    finally:
        for (owner, name), own in zip(found, before, strict=True):
            setattr(owner, name, own)


def _with_values(own: Any) -> Any:
    from torch.utils._python_dispatch import _disable_current_modes

    function = own.__func__ if isinstance(own, staticmethod) else own

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch.no_grad():
            return function(*args, **kwargs)

    return staticmethod(run) if isinstance(own, staticmethod) else run
