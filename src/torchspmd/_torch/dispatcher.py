"""The dispatcher: see an operator run without a dispatch mode."""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

_library: Any = torch.library

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


def operator_generation() -> tuple[int, int]:
    """Changes whenever operators may have been added: by an import, or by a library."""
    return len(sys.modules), len(_library._defs)


def observe(kernels: dict[torch._ops.OpOverload, Kernel]) -> Callable[[], None]:
    """Run each kernel in front of its operator; return the function that undoes it.

    A kernel is called as ``kernel(keyset, *args, **kwargs)`` and goes on with
    ``call_below``.
    """
    # What torch.library.Library does, without its bookkeeping for each kernel: this runs
    # whenever a recording begins.
    libraries: dict[str, Any] = {}
    key = _OBSERVED_KEY.name
    for op, kernel in kernels.items():
        namespace, _, name = op.name().partition("::")
        library: Any = libraries.get(namespace)
        if library is None:
            library = torch._C._dispatch_library("IMPL", namespace, key, __file__, 0)
            libraries[namespace] = library
        library.impl(name, key, kernel, True)

    def undo() -> None:
        for library in libraries.values():
            library.reset()

    return undo


def call_below(
    op: torch._ops.OpOverload, keyset: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Go on with an operator below an observing kernel."""
    # What op.redispatch does, one Python call shorter.
    return op._handle.redispatch_boxed(keyset & _BELOW, *args, **kwargs)


def packet_name(op: torch._ops.OpOverload) -> str:
    """``namespace::name`` of an operator, without its overload."""
    return op._schema.name


def argument_names(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of an operator's arguments, in order."""
    return tuple(argument.name for argument in op._schema.arguments)
