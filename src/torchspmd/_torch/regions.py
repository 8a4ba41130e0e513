"""The border of a manual region: trees, DTensors, and what autograd communicates."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from enum import Enum
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from torchspmd._torch.groups import resolve_group

if TYPE_CHECKING:  # it takes longer to import than the rest of torchspmd
    from torch.distributed.tensor import Placement


def flatten_tree(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of nested lists, tuples, dicts and registered nodes, and their shape."""
    return torch.utils._pytree.tree_flatten(tree)


def unflatten_tree(leaves: list[Any], structure: Any) -> Any:
    """The tree that ``flatten_tree`` took apart, with other leaves."""
    return torch.utils._pytree.tree_unflatten(leaves, structure)


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree with a function applied to every leaf."""
    return torch.utils._pytree.tree_map(function, tree)


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """The same for tensors alone, dataclasses and packed sequences opened too."""
    return torch.distributed.utils._apply_to_tensors(function, tree)


_T = TypeVar("_T")


# What has no leaves in it, and what torch's own walk, which takes longer, need not open.
_PLAIN = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device})
_SEQUENCES = (list, tuple)


def leaves_of(kind: type[_T], tree: Any) -> Iterator[_T]:
    """The leaves of one type, in order, also of mappings that torch takes for a leaf."""
    if isinstance(tree, kind):
        yield tree
    elif type(tree) in _SEQUENCES:
        for each in tree:
            if isinstance(each, kind):
                yield each
            elif type(each) not in _PLAIN:
                yield from leaves_of(kind, each)
    elif isinstance(tree, Mapping):
        yield from leaves_of(kind, list(tree.values()))
    elif type(tree) not in _PLAIN:
        leaves = torch.utils._pytree.tree_leaves(tree)
        if len(leaves) != 1 or leaves[0] is not tree:
            yield from leaves_of(kind, leaves)


def leaf_paths(tree: Any) -> list[tuple[Any, ...]]:
    """The path of each leaf, in the order of ``flatten_tree``.

    A step is the index, key or attribute name that leads one level down.
    """
    with_paths, _ = torch.utils._pytree.tree_flatten_with_path(tree)
    return [tuple(_step(entry) for entry in path) for path, _ in with_paths]


def _step(entry: Any) -> Any:
    for attribute in ("idx", "key", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def finished(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor behind a functional collective that may still be running."""
    if type(tensor) is AsyncCollectiveTensor:
        return tensor.wait()
    return tensor


def strided_spec(
    mesh: DeviceMesh,
    placements: "tuple[Placement, ...]",
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Any:
    """A spec for ``wrap_local``, of a global tensor with these strides."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return DTensorSpec(mesh, placements, tensor_meta=meta)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape but no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.is_meta


def dtensor_slots(module: torch.nn.Module) -> list[tuple[str, dict[str, Any], str]]:
    """Where a module keeps DTensors: full name, the dict that holds it, the key in it."""
    from torch.distributed.tensor import DTensor

    return [
        (f"{prefix}.{name}" if prefix else name, table, name)
        for prefix, child in module.named_modules()
        for table in (child._parameters, child._buffers)
        for name, tensor in table.items()
        if isinstance(tensor, DTensor)
    ]


_GENERATED = "GeneratedBackwardFor_"
_FUNCTIONAL = ("_c10d_functional_autograd_", "_c10d_functional_")
# The backward of each of these is the exact transpose of its forward. After the first
# group the value is the same on every rank, after the second it is not.
_SAME_AFTER = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
)
_DIFFERENT_AFTER = (
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
)
_PASSES_ON = ("wait_tensor", "_wrap_tensor_autograd")
_LEGACY = {  # torch.distributed.nn.functional
    "_AllReduceBackward": "all_reduce",
    "_AllGatherBackward": "all_gather_into_tensor",
    "_AllGatherBaseBackward": "all_gather_into_tensor",
    "_Reduce_ScatterBackward": "reduce_scatter_tensor",
    "_AlltoAllBackward": "all_to_all_single",
    "_AlltoAllSingleBackward": "all_to_all_single",
}
_RELABELS = ("_ToTorchTensorBackward", "_FromTorchTensorBackward")


class NodeKind(Enum):
    """What an autograd node does between ranks."""

    LOCAL = "local"
    MAKES_EQUAL = "makes equal"  # after it the value is the same on the whole group
    EXCHANGES = "exchanges"  # another collective with a backward
    OPAQUE = "opaque"  # a custom function, whose backward may be anything


# Types of nodes that are known to communicate nothing; grows as nodes are seen.
LOCAL_NODE_TYPES: set[type] = set()


def node_name(node: Any) -> str:
    """An autograd node's name; Python's own have one of their class only, before 2.12."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return type(node).__name__
    return str(node.name())


def node_kind(node: Any) -> NodeKind:
    """What an autograd node does between ranks."""
    is_python = isinstance(node, torch.autograd.function.BackwardCFunction)
    name = node_name(node)
    kind = _kind_of(name, is_python)
    # Each operator's node has its own type, except for those of C++ extensions; custom
    # functions may be made and dropped, and must not be kept here.
    is_own_type = not is_python and type(node).__name__ == name
    if kind is NodeKind.LOCAL and is_own_type:
        LOCAL_NODE_TYPES.add(type(node))
    return kind


def _kind_of(name: str, is_python: bool) -> NodeKind:
    op = _LEGACY.get(name) or _functional_name(name)
    if op in _SAME_AFTER:
        return NodeKind.MAKES_EQUAL
    if op in _DIFFERENT_AFTER:
        return NodeKind.EXCHANGES
    if op in _PASSES_ON or name in _RELABELS:
        return NodeKind.LOCAL
    # A function of C++ is as opaque as one of Python. Before torch 2.12 the differentiable
    # functional collectives are such, and do not tell their group.
    is_opaque = is_python or "NotImplemented" in name or "CppNode<" in name
    return NodeKind.OPAQUE if is_opaque else NodeKind.LOCAL


def node_group(node: Any) -> dist.ProcessGroup:
    """The group of a node that is a collective with a backward."""
    if node_name(node) in _LEGACY:
        group = node.group or dist.group.WORLD
    else:
        group = resolve_group(node.group_name)
    assert isinstance(group, dist.ProcessGroup), node_name(node)
    return group


def _functional_name(node_name: str) -> str:
    """``all_reduce`` from the name of its generated autograd node; empty for others."""
    if not node_name.startswith(_GENERATED):
        return ""
    rest = node_name.removeprefix(_GENERATED).removesuffix("_defaultBackward")
    for namespace in _FUNCTIONAL:
        if rest.startswith(namespace):
            return rest.removeprefix(namespace)
    return ""


@functools.cache
def has_backward(operator: str) -> bool:
    """Whether autograd knows a backward of ``namespace::name``."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(operator, "Autograd"))


_APPLY = inspect.unwrap(torch.autograd.Function.apply).__code__


class _CallObserver(TorchDispatchMode):
    """Tells a function about every operator that this thread calls."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled functions stay compiled inside."""
        return True

    def __init__(self, note: Callable[[Any, tuple[Any, ...], Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if isinstance(func, torch._ops.OpOverload):
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def observe_calls(note: Callable[[Any, tuple[Any, ...], Any], None]) -> Iterator[None]:
    """Call ``note(operator, args, kwargs)`` before every operator called inside."""
    with _CallObserver(note):
        yield


def is_in_custom_function(stop: CodeType | None) -> bool:
    """Whether this thread runs an autograd function, called further in than ``stop``."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not stop:
        if frame.f_code is _APPLY:
            return True
        frame = frame.f_back
    return False


# ----------------------------------------------------------------------------
# Dataclasses as nodes of a tree, without a registration of the user's own class.


class Record:
    """Stands for a dataclass in a tree; put together again, the tree has a dataclass."""

    def __init__(self, original: Any, values: list[Any]) -> None:
        _register()
        self.original, self.values = original, values


def record_fields(value: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a dataclass that have a value."""
    for field in fields(value):
        if hasattr(value, field.name):
            yield field.name, getattr(value, field.name)


@functools.cache
def _register() -> None:
    pytree.register_pytree_node(
        Record, lambda record: (record.values, record.original), _build
    )


def _build(values: Any, original: Any) -> Any:
    # Not by its constructor: that may compute, check or fill in, as it did already.
    made = object.__new__(type(original))
    for name, value in getattr(original, "__dict__", {}).items():
        object.__setattr__(made, name, value)
    names = (name for name, _ in record_fields(original))
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made
