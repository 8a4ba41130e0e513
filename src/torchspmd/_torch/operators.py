"""What an operator's schema says, and how the dispatcher runs it."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast
from unittest import mock

import torch
from torch import fx
from torch._ops import OpOverload

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def kept(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Keep what a function says of each operator, as ``functools.cache``.

    Operators live as long as the process, and to hash one takes longer than most answers:
    these questions are asked of every node of a graph, many times.
    """
    known: dict[Any, tuple[Any, Any]] = {}  # with the operator, so that it stays alive

    @wraps(function)
    def find(operator: Any, *rest: Any) -> Any:
        key = (id(operator), *rest) if rest else id(operator)
        found = known.get(key)
        if found is None:
            ask: Any = function
            found = known[key] = operator, ask(operator, *rest)
        return found[1]

    return cast(Callable[_Parameters, _Result], find)


@dataclass(frozen=True, slots=True)
class Signature:
    """How to read a call of one operator.

    Attributes:
        name: ``namespace::name`` of its functional form: ``aten::add`` for ``add_`` too.
        overload: The overload, empty for the default one.
        arguments: The names of its arguments, in order; without those it only writes to.
        defaults: The values of arguments that a call may leave out.
        written: The names of the arguments that it writes into.
        is_random: Whether it takes random numbers.
        is_elementwise: Whether each element of the result depends on that element alone.
    """

    name: str
    overload: str
    arguments: tuple[str, ...]
    defaults: dict[str, Any]
    written: tuple[str, ...]
    is_random: bool
    is_elementwise: bool


@kept
def signature_of(operator: OpOverload) -> Signature:
    """Read an operator's schema."""
    schema = operator._schema
    written = tuple(
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    names = tuple(a.name for a in schema.arguments if not a.is_out)
    return Signature(
        _functional_name(schema.name, bool(written)),
        operator._overloadname.removesuffix("default"),
        names,
        {a.name: a.default_value for a in schema.arguments if a.has_default_value()},
        written,
        _is_seeded(operator),
        torch.Tag.pointwise in operator.tags,
    )


def _functional_name(name: str, writes: bool) -> str:
    return name.removesuffix("_out").removesuffix("_") if writes else name


def draws_random_numbers(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether a call takes numbers from a generator."""
    if not isinstance(operator, OpOverload) or not _is_seeded(operator):
        return False
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":  # attention draws for nothing else
            given = args[place] if place < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", given))
    return True


@kept
def _is_seeded(operator: OpOverload) -> bool:
    """Whether an operator may draw; a backward of attention is given its forward's seed."""
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    return all(
        argument.name != "philox_seed" for argument in operator._schema.arguments
    )


_DEVICE = torch.ops.prim.device.default


def asked_device(operator: Any, args: Sequence[Any]) -> torch.device | None:
    """The device of a fake tensor, where an operator asks for that; None for all others."""
    if operator is not _DEVICE or not hasattr(args[0], "fake_device"):
        return None
    # As its class answers: in a rehearsal C++ sees another device than Python.
    return type(args[0]).__torch_dispatch__(operator, (), args)


def only_has_effects(operator: Any) -> bool:
    """Whether an operator returns and writes nothing, and fx would remove it."""
    if not isinstance(operator, OpOverload) or operator.namespace == "profiler":
        return False
    if operator._schema.returns or operator._schema.is_mutable:
        return False
    return not fx.Graph().call_function(operator).is_impure()


# ----------------------------------------------------------------------------
# Which operators write into their arguments, share their memory, or could.

# They may hand on the memory of their first argument, but their schemas do not say so.
_SILENT_VIEWS = frozenset(
    {
        "aten::_unsafe_view",
        "aten::alpha_dropout",  # outside of training, like those below
        "aten::atleast_1d",
        "aten::atleast_2d",
        "aten::atleast_3d",
        "aten::broadcast_tensors",
        "aten::cartesian_prod",
        "aten::conj_physical",
        "aten::dropout",
        "aten::feature_alpha_dropout",
        "aten::feature_dropout",
        "aten::lift",
        "aten::meshgrid",
        "aten::native_dropout",
        "aten::sum_to_size",
        "aten::type_as",
        "aten::unsafe_chunk",
        "aten::unsafe_split",
        "aten::unsafe_split_with_sizes",
        "_c10d_functional::wait_tensor",
        "c10d_functional::wait_tensor",
    }
)
# Elementwise, though not tagged so.
_WRITERS = ("aten::copy", "aten::fill", "aten::zero")


def in_place_form(operator: Any) -> OpOverload | None:
    """The operator that writes its result into its first argument, element by element.

    None for an operator that has no such form, or that reads other elements than the one
    it writes.
    """
    return _in_place_form(operator) if isinstance(operator, OpOverload) else None


@kept
def _in_place_form(operator: OpOverload) -> OpOverload | None:
    schema = operator._schema
    if operator.namespace != "aten":
        return None
    name = schema.name.removeprefix("aten::")
    is_list = name.startswith(("_foreach_", "_fused_"))
    is_elementwise = torch.Tag.pointwise in operator.tags or schema.name in _WRITERS
    if schema.is_mutable or not (is_list or is_elementwise):
        return None
    packet = getattr(torch.ops.aten, f"{name}_", None)
    form = getattr(packet, operator._overloadname, None)
    return form if isinstance(form, OpOverload) and 0 in _written(form) else None


class FunctionalForm(NamedTuple):
    """An operator that returns what another one writes.

    Attributes:
        operator: The operator; it takes the same arguments.
        num_results: What the other one returns that it does not write, first.
        num_returns: All that it returns.
    """

    operator: OpOverload
    num_results: int
    num_returns: int


@kept
def functional_form(operator: OpOverload) -> FunctionalForm | None:
    """The operator that returns new values instead of writing them.

    None where there is none, and for operators that draw random numbers: those draw in the
    order in which memory lies.
    """
    if _is_seeded(operator):
        return None
    schema, name = operator._schema, operator._opname
    name = name[:-1] if name.endswith("_") else f"{name}_functional"
    packet = getattr(getattr(torch.ops, operator.namespace), name, None)
    form = getattr(packet, operator._overloadname, None)
    if not isinstance(form, OpOverload) or form._schema.is_mutable:
        return None
    own = [each for each in schema.returns if each.alias_info is None]
    count = len(form._schema.returns)
    is_same = argument_names(form) == argument_names(operator)
    if not is_same or count != len(own) + len(_written(operator)):
        return None
    return FunctionalForm(form, len(own), count)


def is_fused_optimizer(operator: Any) -> bool:
    """Whether an operator makes a whole update, in place."""
    name = getattr(operator, "_opname", "")
    return name.startswith(("_fused_ada", "_fused_sgd")) and name.endswith("_")


def is_elementwise(operator: Any) -> bool:
    """Whether each element of what an operator writes is computed by itself."""
    if not isinstance(operator, OpOverload):
        return False
    is_pointwise = torch.Tag.pointwise in operator.tags
    return is_pointwise or operator._opname.startswith("_foreach_")


@cache
def is_pointwise(name: str) -> bool:
    """Whether an operator, named as in ``aten.exp_.default``, is tagged pointwise."""
    space, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    known = getattr(getattr(torch.ops, space, None), packet, None)
    operator = getattr(known, overload or "default", None)
    return torch.Tag.pointwise in getattr(operator, "tags", ())


def reduction_in_place(operator: Any) -> OpOverload | None:
    """The all-reduce that works in its argument's memory; None for other operators."""
    functional = torch.ops._c10d_functional
    if operator is not functional.all_reduce.default:
        return None
    return functional.all_reduce_.default


def written_arguments(operator: Any) -> tuple[int, ...]:
    """The places of the arguments that an operator writes into."""
    return _written(operator) if isinstance(operator, OpOverload) else ()


def written_values(
    operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[Any]:
    """What a call gives for each argument that its operator writes into."""
    return [
        args[place] if place < len(args) else kwargs.get(name)
        for place, name in _written_by_name(operator)
    ]


@kept
def _written_by_name(operator: Any) -> tuple[tuple[int, str], ...]:
    places = written_arguments(operator)
    if not places:
        return ()
    return tuple(zip(places, signature_of(operator).written, strict=True))


def set_arguments(node: fx.Node, args: Any, kwargs: Any) -> None:
    """Give a node other arguments, both kinds at once: fx notes all uses each time."""
    write = getattr(node, "_update_args_kwargs", None)
    if write is not None:
        write(args, kwargs)
    else:
        node.args, node.kwargs = args, kwargs


@contextlib.contextmanager
def keeping_names(graph: fx.Graph) -> Iterator[None]:
    """Give new nodes of an empty graph the names that are asked for: all of another one.

    Without a search for a free one each, which takes a third of the time of a copy.
    """
    namespace: Any = graph._graph_namespace
    namespace.create_name = lambda candidate, obj: candidate
    try:
        yield
    finally:
        del namespace.create_name
        # As fx would have counted, so that later nodes get the same names.
        for node in graph.nodes:
            namespace._used_names.add(node.name)
            base, _, number = node.name.rpartition("_")
            if base and number.isdigit():
                namespace._base_count[base] = int(number)
            else:
                namespace._base_count.setdefault(node.name, 0)


@kept
def _written(operator: OpOverload) -> tuple[int, ...]:
    return tuple(
        place
        for place, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@kept
def shared_arguments(operator: OpOverload, item: int | None = None) -> tuple[int, ...]:
    """The places of the arguments whose memory an operator's result may lie in.

    Args:
        operator: The operator.
        item: Which of several results; None for any of them.
    """
    schema = operator._schema
    results = schema.returns
    if item is not None and len(results) > 1:
        results = results[item : item + 1]
    if schema.name in _SILENT_VIEWS:
        return (0,) if item is None or results == schema.returns[:1] else ()
    found = [each.alias_info for each in results if each.alias_info is not None]
    names = {name for info in found for name in info.before_set}
    return tuple(
        place
        for place, argument in enumerate(schema.arguments)
        if found
        and argument.alias_info is not None
        and (not names or argument.alias_info.before_set & names)  # lists name none
    )


@kept
def gives_one_tensor(operator: OpOverload) -> bool:
    """Whether an operator's result is one tensor, not a list or a tuple of them."""
    results = operator._schema.returns
    return len(results) == 1 and isinstance(results[0].type, torch.TensorType)


@cache
def tensor_methods(name: str) -> tuple[OpOverload, ...]:
    """The ATen operators that a method of tensors may call; empty where it is none."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return ()
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return tuple(each for each in found if _takes_tensor(each))


def _takes_tensor(operator: OpOverload) -> bool:
    arguments = operator._schema.arguments
    return bool(arguments) and isinstance(arguments[0].type, torch.TensorType)


def storage_bytes(tensor: torch.Tensor) -> int:
    """The size of the memory that a tensor lies in."""
    return int(tensor.untyped_storage().nbytes())


# ----------------------------------------------------------------------------
# The dispatcher: see an operator run without a dispatch mode.

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


@kept
def packet_name(op: torch._ops.OpOverload) -> str:
    """``namespace::name`` of an operator, without its overload."""
    return op._schema.name


def allows_tf32(what: str) -> bool:
    """Whether ``matmul`` or ``convolution`` of float32 on CUDA may use TF32."""
    backends: Any = torch.backends
    owner = backends.cuda.matmul if what == "matmul" else backends.cudnn
    conv = getattr(backends.cudnn, "conv", None)
    for each in (owner if what == "matmul" else conv, backends):
        asked = getattr(each, "fp32_precision", "none")
        if asked != "none":
            return bool(asked == "tf32")
    return bool(owner.allow_tf32)


@kept
def argument_names(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of an operator's arguments, in order."""
    return tuple(argument.name for argument in op._schema.arguments)


# ----------------------------------------------------------------------------
# The memory behind tensors.


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share their memory, also on the meta device.

    Another tensor may get the number once the memory is freed.
    """
    return int(tensor.untyped_storage()._cdata)


# ----------------------------------------------------------------------------
# Collectives as nodes of a graph.

_functional = torch.ops._c10d_functional
ALL_REDUCE = _functional.all_reduce.default
ALL_GATHER = _functional.all_gather_into_tensor.default
ALL_GATHER_OUT = _functional.all_gather_into_tensor_out.default
REDUCE_SCATTER = _functional.reduce_scatter_tensor.default
ALL_TO_ALL = _functional.all_to_all_single.default
WAIT = _functional.wait_tensor.default


# ----------------------------------------------------------------------------
# Kernels that replace torch's.


def find_overload(name: str) -> OpOverload | None:
    """The operator of ``aten`` of this name, as in ``pow.Scalar``; None where none is."""
    packet, _, overload = name.partition(".")
    found = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    return found if isinstance(found, OpOverload) else None


def library_name(operator: OpOverload) -> str:
    """What ``torch.library.Library.impl`` knows an operator as."""
    return str(operator.name()).partition("::")[2]


def autocast_names(device: str) -> set[str]:
    """What autocast of a device changes in ``aten``, as ``Library.impl`` knows it."""
    key = f"Autocast{device.upper()}"
    return {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::")
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }


def remove_library(library: torch.library.Library) -> None:
    """Remove its kernels; torch's own are used again."""
    library._destroy()


def no_autocast() -> contextlib.AbstractContextManager[None]:
    """Operators that are called inside of autocast's own kernels pass it by."""
    return torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


def below_autograd() -> contextlib.AbstractContextManager[None]:
    """Operators that are called inside are those that autograd would have called."""
    return torch._C._AutoDispatchBelowAutograd()


def flex_attention_by(
    kernel: Callable[..., Any],
) -> contextlib.AbstractContextManager[Any]:
    """Inside, ``flex_attention`` calls a function, and compiles nothing by itself."""
    from torch.nn.attention import flex_attention  # slow to import

    return mock.patch.multiple(
        flex_attention,
        flex_attention_hop=kernel,
        _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True,
    )


_AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def on_lists(name: str) -> Any:
    """The function of torch that calls ``Tensor.name`` on each tensor of a list."""
    return getattr(torch, f"_foreach_{name}")
