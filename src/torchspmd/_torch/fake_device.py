"""Tensors without memory that Python sees on ``cuda`` and torch's C++ on ``cpu``.

A torch without CUDA cannot compute with ``cuda`` tensors, not even fake ones: autograd and
many functions ask for a device guard that is not there. So C++ sees ``cpu:0``, a device
that no script names, and everything in Python ``cuda``: the shape functions of operators
too, so that results have the dtypes and strides of CUDA kernels. Tensors of the host are
``cpu`` on both sides; small ones are real, so that a data pipeline keeps its values.
"""

import contextlib
import copy
import functools
import inspect
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.utils
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import _functional_collectives as functional_collectives
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nested._internal import sdpa as jagged_attention
from torch.nested._internal.nested_int import NestedIntNode
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only

from torchspmd._torch.accumulation import Accumulation
from torchspmd._torch.autograd import backward_under
from torchspmd._torch.known_values import (
    is_worth_following,
    may_follow,
    set_known,
    share_known,
)
from torchspmd._torch.landmarks import is_torch_code
from torchspmd._torch.operator_cache import OperatorCache
from torchspmd._torch.sparse import is_sparse, sparse_parts, sparse_result
from torchspmd.errors import UsageError

_INNER = torch.device("cpu", 0)  # what C++ sees
_SHOWN = torch.device("cuda", 0)  # what shape functions see
_REAL_BYTES = 8 << 20  # tensors of the host up to this size are real

_DEVICE = torch.ops.prim.device.default
# Gives what a collective has started, to be waited for when it is used; not in torch 2.11.
_WRAP = getattr(
    getattr(torch.ops._c10d_functional, "_wrap_tensor_autograd", None), "default", None
)
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
# Errors of torch where it has no shape function, or one that would need values.
_NO_SHAPE = (
    fake_tensor.UnsupportedOperatorException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
    NotImplementedError,
)
# Of tensors that a kernel of the host is run on for the shapes of its results.
_MODEL_BYTES = 256 << 20
_QUERIES = frozenset(fake_tensor._DISPATCH_META_HANDLERS) | frozenset(
    fake_tensor._DISPATCH_HANDLE_DIRECTLY
)

# Is given an operator of the device with its arguments, and a function that runs it.
OnOperator = Callable[
    [OpOverload, Sequence[Any], Mapping[str, Any], Callable[[], Any]], Any
]


def is_fake_tensor(value: object) -> bool:
    """Whether a tensor has no values."""
    return isinstance(value, FakeTensor)


def is_device_tensor(value: object) -> bool:
    """Whether a tensor, or the first one that a subclass wraps, is on the device."""
    if isinstance(value, FakeTensor):
        return value.fake_device.type == "cuda"
    inner = next(_wrapped(value), None)
    return inner is not None and is_device_tensor(inner)


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """What a DTensor, a quantised tensor or another wrapper holds; a tensor by itself."""
    if not isinstance(value, torch.Tensor):
        return
    is_wrapper = False
    if not isinstance(value, FakeTensor):
        for inner in _wrapped(value):
            is_wrapper = True
            yield from plain_tensors(inner)
    if not is_wrapper:
        yield from _parts(value) if is_sparse(value) else [value]


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The indices and values of a sparse tensor."""
    if not is_rehearsed(tensor):
        yield from sparse_parts(tensor)
        return
    mode: FakeDeviceMode = tensor.fake_mode  # type: ignore[attr-defined]
    with mode.unwatched():
        parts = [*sparse_parts(tensor)]
    yield from parts


def _wrapped(value: Any) -> Iterator[torch.Tensor]:
    """The tensors that a subclass is made of.

    Its own list of them is not asked for: some look at values to make it.
    """
    if not hasattr(value, "__tensor_flatten__"):
        return
    for name in (*getattr(value, "__slots__", ()), *getattr(value, "__dict__", ())):
        inner = getattr(value, name, None)
        if isinstance(inner, torch.Tensor):
            yield inner


def is_rehearsed(value: object) -> bool:
    """Whether a tensor without values is one that a rehearsal computes with."""
    return isinstance(value, FakeTensor) and isinstance(value.fake_mode, FakeDeviceMode)


def _is_cuda(value: Any) -> bool:
    """Whether something names the presented device."""
    if isinstance(value, torch.device):
        return value.type == "cuda" or value == _INNER
    return isinstance(value, str) and value.partition(":")[0] == "cuda"


# ----------------------------------------------------------------------------
# Below: what the dispatcher hands over.


class FakeDeviceMode(FakeTensorMode):
    """Gives every operator on the device a result without memory.

    Args:
        on_operator: Is called for each operator on the device; runs it.
        on_subclass: Is called for each operator of DTensors and other wrappers, whose inner
            operators follow.
    """

    def __init__(
        self, on_operator: OnOperator, on_subclass: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._on_operator, self._on_subclass = on_operator, on_subclass
        self._cache = OperatorCache(self)
        self._accumulation = Accumulation()
        self._inside = False
        # Threads take turns: operators have one recording.
        self._turn = threading.RLock()
        self._thread = threading.get_ident()
        self.on_other_thread: Callable[[], None] = lambda: None
        self.is_over = False  # whether threads that are left have to end
        # Its memory of tensors is weak references, and a module whose parameters have
        # them could not be moved.
        converter: Any = self.fake_tensor_converter
        converter.set_tensor_memo = lambda tensor, fake: None

    supports_higher_order_operators = True
    # Nothing of a real device is ever initialised, whatever torch.cuda says.
    avoid_device_init = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _DEVICE:
            return _inner_device(args[0])
        if func is _WRAP:
            return functional_collectives.AsyncCollectiveTensor(args[0])
        if isinstance(func, HigherOrderOperator):
            return self._higher_order(func, args, kwargs or {})
        if types and _has_subclass(types):
            self._on_subclass()
            return NotImplemented
        if self.is_over:
            raise SystemExit
        # Below, no Python code names a device: the function mode can be off.
        with self._turn, torch._C.DisableTorchFunction():
            return self._dispatch(func, types, args, kwargs or {})

    def _higher_order(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if func.name() == "run_dtensor_rng_op":
            # Two offsets, an operator, its arguments.
            with self:
                return args[2](*args[3:], **kwargs)
        handler = func.python_key_table.get(FakeTensorMode)
        if handler is None:
            return self.dispatch(func, (), args, kwargs)
        return handler(self, *args, **kwargs)

    def _dispatch(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        if func in _QUERIES:
            return self.dispatch(func, types, args, kwargs)
        if self._is_of_another(args):
            return func(*args, **kwargs)
        if any(map(is_sparse, args)):
            with self:
                result = sparse_result(func, args, kwargs)
            if result is not NotImplemented:
                return result
        func = self._accumulation.in_place(func, args)
        if kwargs.get("pin_memory"):  # by a hook that C++ calls, where no other mode is
            kwargs = {**kwargs, "pin_memory": False}
        device = kwargs.get("device")
        if device is not None and _is_cuda(device):
            kwargs = {**kwargs, "device": _SHOWN}
        elif (
            not self._inside  # what a shape function makes is as empty as its result
            and not any(issubclass(kind, FakeTensor) for kind in types)
            and (types or not _makes_much(func, args, kwargs))
        ):
            return func(*args, **kwargs)  # all on the host, and real
        if self._inside:
            return self.dispatch(func, types, args, kwargs)
        if func in _LIFTS:
            return args[0]
        if torch.is_inference_mode_enabled() and (composed := _composed(func)):
            with self:
                return composed(*args, **kwargs)
        args, kwargs = self._without_values(args), self._without_values(kwargs)
        self._inside = True
        if threading.get_ident() != self._thread:
            self.on_other_thread()
        try:
            return self._on_operator(
                func, args, kwargs, lambda: self._run(func, args, kwargs)
            )
        finally:
            self._inside = False

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        def call() -> Any:
            return self._cache.call(
                func, args, kwargs, lambda: self._result(func, args, kwargs)
            )

        if torch.is_inference_mode_enabled() and _views_other(func, args):
            with torch.inference_mode(False):
                return call()
        return call()

    def _result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What torch's shape function gives; where there is none, the host's kernel."""
        try:
            return self.dispatch(func, (FakeTensor,), args, kwargs)
        except _NO_SHAPE as error:
            result = _computed_on_host(func, args, kwargs, error)
        places = [
            x.fake_device for x in tree_leaves((args, kwargs)) if is_fake_tensor(x)
        ]
        place = places[0] if places else _SHOWN

        def empty(real: torch.Tensor) -> torch.Tensor:
            meta = torch.empty_strided(
                real.size(), real.stride(), dtype=real.dtype, device="meta"
            )
            return FakeTensor(self, meta, place)

        return tree_map_only(torch.Tensor, empty, result)

    def learn_accumulation(self) -> None:
        """See how autograd adds gradients up, while this mode is in force."""
        with self.unwatched():
            self._accumulation.learn(lambda value: torch.full((), value, device=_SHOWN))

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Inside, ``on_operator`` is not called."""
        with self._turn:
            before, self._inside = self._inside, True
            try:
                yield
            finally:
                self._inside = before

    def entered_here(self) -> contextlib.AbstractContextManager[object]:
        """In force in one more thread; what it keeps of that is not one thread's."""
        stack = contextlib.ExitStack()
        with self._turn:
            stack.enter_context(self)
        return stack

    def _is_of_another(self, args: Sequence[Any]) -> bool:
        """Whether tensors belong to another mode: the values of a captured graph."""
        for value in args:
            each = value[0] if isinstance(value, tuple | list) and value else value
            if isinstance(each, FakeTensor):
                return each.fake_mode is not self
        return False

    def _without_values(self, value: Any) -> Any:
        """Real tensors as fake ones of the host, made anew.

        torch's own way keeps weak references to them, and a module with such parameters
        could not be moved.
        """
        if isinstance(value, tuple | list):
            if not any(_is_container_or_real(each) for each in value):
                return value
            return type(value)(map(self._without_values, value))
        if isinstance(value, dict):
            return {key: self._without_values(each) for key, each in value.items()}
        if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
            return value
        meta = torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device="meta"
        )
        fake: Any = FakeTensor(self, meta, torch.device("cpu"))
        fake.host = value  # for whoever writes it
        if may_follow(value) and is_worth_following(value):
            set_known(fake, value.clone())
        return fake


def _computed_on_host(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> Any:
    """What an operator gives for tensors of ones, as a model for its result."""
    leaves = tree_leaves((args, kwargs))
    tensors = [part for each in leaves for part in plain_tensors(each)]
    nbytes = sum(each.numel() * each.element_size() for each in tensors)
    if func.namespace == "c10d":
        raise UsageError(
            f"{func}: NCCL sends no sparse tensors. Make embeddings with sparse=False, or "
            "leave them to one rank."
        ) from error
    refusal = UsageError(
        f"{func}: torch has no shape function for it, and its kernel for CPUs gives no "
        "model of the result. For an operator of a library, register one with "
        "torch.library.register_fake; else take another operator, such as one on dense "
        "tensors, or put it behind an option that a rehearsal leaves out."
    )
    if func._schema.is_mutable or nbytes > _MODEL_BYTES:
        raise refusal from error
    with no_dispatch():
        try:
            result = func(
                *tree_map_only(torch.Tensor, _ones_like, args),
                **tree_map_only(torch.Tensor, _ones_like, kwargs),
            )
        except Exception:  # whatever a kernel says to ones
            raise refusal from error
    if any(map(is_sparse, tree_leaves(result))):
        raise refusal from error
    return result


def _ones_like(tensor: torch.Tensor) -> Any:
    if not is_fake_tensor(tensor):
        return tensor
    if is_sparse(tensor):
        parts = [torch.zeros(x.size(), dtype=x.dtype) for x in sparse_parts(tensor)]
        make: Any = torch.sparse_coo_tensor
        return make(*parts, tensor.size())
    return torch.ones(tensor.size(), dtype=tensor.dtype)


def _views_other(func: Any, args: Sequence[Any]) -> bool:
    """Whether a view shares the writes of a tensor that inference mode did not make."""
    is_view = isinstance(func, OpOverload) and func.is_view
    return is_view and isinstance(args[0], torch.Tensor) and not args[0].is_inference()


def _composed(func: Any) -> Callable[..., Any] | None:
    """What takes an operator apart where autograd is, which inference mode skips."""
    if not isinstance(func, OpOverload):
        return None
    has: Any = functools.partial(
        torch._C._dispatch_has_kernel_for_dispatch_key, func.name()
    )
    if has("AutogradCPU"):  # as attention chooses its kernel in a rehearsal
        return functools.partial(func._op_dk, torch._C.DispatchKey.AutogradCPU)
    has_own = has("CPU") or func.name() == "aten::_fused_rms_norm"  # CUDA has one
    return func.decompose if has("CompositeImplicitAutograd") and not has_own else None


def _is_container_or_real(value: object) -> bool:
    return isinstance(value, tuple | list) or (
        isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
    )


def _has_subclass(types: Sequence[Any]) -> bool:
    """Whether a DTensor or another wrapper is there, which handles the call first."""
    return any(
        not issubclass(kind, FakeTensor)
        and kind is not torch.Tensor
        and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        for kind in types
    )


def _makes_much(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator that takes no fake tensor makes one that should hold no memory.

    A large one, or one like a tensor of the meta device: parameters that ``to_empty``
    leaves on the host hold no values yet, and a whole model of them no memory here.
    """
    if kwargs.get("device") == torch.device("meta"):  # has no memory by itself
        return False
    size = args[0] if args else kwargs.get("size")
    dtype = kwargs.get("dtype")
    if isinstance(size, torch.Tensor):
        name = func.name()
        if name.endswith("_like"):
            like, size = size, size.shape
        elif name.startswith("aten::new_") and len(args) > 1:
            like, size = size, args[1]
        else:
            return False
        if like.is_meta:
            return kwargs.get("device") is not None
        dtype = dtype or like.dtype
    if not isinstance(size, list | tuple) or not all(isinstance(n, int) for n in size):
        return False
    dtype = dtype or torch.get_default_dtype()
    return bool(math.prod(size) * dtype.itemsize > _REAL_BYTES)


def _inner_device(tensor: Any) -> torch.device:
    """The device as C++ sees it."""
    if tensor.fake_mode.in_kernel_invocation:
        return torch.device("meta")
    device: torch.device = tensor.fake_device
    return _INNER if device.type == "cuda" else device


# ----------------------------------------------------------------------------
# Above: what Python says and sees.

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


class ShownAsCuda(TorchFunctionMode):
    """Lets Python name ``cuda`` and read it back; C++ is given ``cpu:0``.

    Args:
        no_value: Is called where the values of a tensor are asked for that has none, with
            the call; gives what the call gives.
        on_record_stream: Is called with a tensor and a stream.
        inner: What C++ is given. With ``cpu`` itself, tensors are real and those of the
            host, so Python reads ``cpu`` back, but for what runs under ``all_shown``.
    """

    def __init__(
        self,
        no_value: Callable[[str, torch.Tensor], Any],
        on_record_stream: Callable[[torch.Tensor, Any], None],
        inner: torch.device = _INNER,
    ) -> None:
        super().__init__()
        self.index = 0  # of the current device
        self.is_named = False  # whether anything was ever put there
        self.is_default = False  # whether tensors are made there that name no device
        self._all_shown = False
        self._given = inner
        self.read = no_value
        self.record_stream = on_record_stream
        tensor = torch.Tensor
        self._special: dict[Any, Callable[..., Any]] = {
            tensor.to: self._to,
            tensor.cuda: self._cuda,
            tensor.type: self._type,
            tensor.device.__get__: self._device,
            tensor.is_cuda.__get__: self._is_cuda,  # type: ignore[attr-defined]
            tensor.data.__set__: self._set_data,  # type: ignore[attr-defined]
            tensor.get_device: self._get_device,
            tensor.new: self._new,
            tensor.new_tensor: self._new_tensor,
            tensor.pin_memory: self._pin_memory,
            tensor.is_pinned: self._is_pinned,
            tensor.data_ptr: self._data_ptr,
            tensor.numpy: self._numpy,
            tensor.__array__: self._numpy,
            tensor.tolist: self._numpy,
            tensor.__bool__: self._numpy,
            tensor.__format__: self._format,
            torch._C._nn._parse_to: self._parse_to,
            torch.device: self._parse_to,
        }

    @property
    def shown(self) -> torch.device:
        """The device, as Python sees it."""
        return torch.device("cuda", self.index)

    @contextlib.contextmanager
    def all_shown(self) -> Iterator[None]:
        """Inside, tensors of the host are shown on the device too."""
        before, self._all_shown = self._all_shown, True
        try:
            yield
        finally:
            self._all_shown = before

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs:
            if type(kwargs.get("device")) is int:  # as in device=local_rank
                kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
            if (
                self.is_default
                and kwargs.get("device") is None
                and func in _CONSTRUCTORS
            ):
                kwargs = {**kwargs, "device": self.shown}
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": self._inner(kwargs["device"])}
                if func in _FROM_DATA:
                    return _on_host(func, args, kwargs).to(self._given)
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        elif self.is_default and func in _CONSTRUCTORS:
            return self.__torch_function__(func, types, args, {"device": self.shown})
        special = self._special.get(func)
        if special is not None:
            return special(func, args, kwargs)
        return func(*args, **kwargs)

    def _inner(self, value: Any) -> Any:
        if not _is_cuda(value):
            return value
        device = torch.device(value)
        if device.type == "cuda":
            self.is_named = True
            if device.index is not None:
                self.index = device.index
        return self._given

    # --- functions that are not only given a device -----------------------------------

    def _to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, *rest = args
        if rest and type(rest[0]) is int:
            rest[0] = torch.device("cuda", rest[0])
        return func(tensor, *map(self._inner, rest), **kwargs)

    def _parse_to(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # As in module.to(local_rank), torch.device(0).
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        return func(*args, **kwargs)

    def _cuda(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = args[1] if len(args) > 1 else kwargs.get("device")
        if device is not None:
            self._inner(torch.device("cuda", device) if type(device) is int else device)
        self.is_named = True
        return args[0].to(self._given)

    def _type(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(args) > 1 and (dtype := _dtype_of_cuda_type(args[1])) is not None:
            self.is_named = True
            return args[0].to(self._given, dtype)
        if len(args) + len(kwargs) > 1:
            return func(*args, **kwargs)
        return func(*args).replace("torch.", "torch.cuda.", is_device_tensor(args[0]))

    def _device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = func(*args, **kwargs)
        is_shown = self._all_shown and device.type == "cpu"
        return self.shown if is_shown or device == _INNER else device

    def _is_cuda(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._all_shown or is_device_tensor(args[0])

    def _get_device(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self.index if is_device_tensor(args[0]) else -1

    def _new_tensor(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tensor, *rest = args
        if not is_device_tensor(tensor) or "device" in kwargs:
            return func(*args, **kwargs)
        like = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return func(like, *rest, **kwargs).to(self._given)

    def _new(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # As tensors were made once: of a size, of data, or empty.
        tensor, *rest = args
        if not is_device_tensor(tensor) or kwargs:
            return func(*args, **kwargs)
        if (
            rest
            and isinstance(rest[0], list | tuple)
            and type(rest[0]) is not torch.Size
        ):
            return self._new_tensor(torch.Tensor.new_tensor, args, kwargs)
        if is_sparse(tensor):
            return torch.sparse_coo_tensor(*rest, check_invariants=False)
        if rest and isinstance(rest[0], torch.Tensor):
            return rest[0].detach()
        return tensor.new_empty(*rest or (0,))

    def _set_data(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tensor, value = args
        if isinstance(tensor, FakeTensor) and isinstance(value, FakeTensor):
            func(tensor, value)
            tensor.fake_device = value.fake_device
            share_known(value, tensor)
        elif isinstance(tensor, FakeTensor) or isinstance(value, FakeTensor):
            # The tensor stays what it is to autograd, and the value what it was.
            needs, grad = tensor.requires_grad, tensor.grad
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            torch.utils.swap_tensors(tensor, value.detach())
            tensor.requires_grad_(needs)
            tensor.grad = grad
            if is_parameter:
                tensor._is_param = True
        else:
            func(tensor, value)

    def _pin_memory(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return args[0]

    def _is_pinned(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return not is_device_tensor(args[0])

    def _data_ptr(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        tensor = args[0]
        return _address(tensor) if isinstance(tensor, FakeTensor) else func(tensor)

    def _format(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, spec = args
        if isinstance(tensor, FakeTensor) and not tensor.dim():
            return format(tensor.item(), spec)  # as of any tensor with one value
        return func(*args, **kwargs)

    def _numpy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(args[0], FakeTensor):
            return self.read(func.__name__, args[0])
        return func(*args, **kwargs)


_CONSTRUCTORS = frozenset(_device_constructors())
_FROM_DATA = frozenset({torch.tensor, torch.as_tensor, torch.asarray})


def _dtype_of_cuda_type(kind: object) -> torch.dtype | None:
    """Of ``torch.cuda.FloatTensor``, or its name."""
    if not isinstance(kind, str):
        kind = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__name__', '')}"
    _, is_on_cuda, name = kind.partition("torch.cuda.")
    plain = getattr(torch, name, None) if is_on_cuda else None
    return getattr(plain, "dtype", None)


@functools.cache
def _both_kinds(kind: type) -> type:
    """A subclass of tensors that have no memory."""
    both: Any = type(kind.__name__, (kind, FakeTensor), {"__module__": kind.__module__})
    # A fake tensor has none.
    both.__torch_function__ = inspect.getattr_static(kind, "__torch_function__")
    return both


def _on_host(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A tensor from Python's data; on the host, as it cannot be made elsewhere."""
    data = args[0] if args else kwargs["data"]
    if isinstance(data, FakeTensor):
        return data.to(kwargs.get("dtype") or data.dtype)
    return func(*args, **{**kwargs, "device": "cpu"})


# ----------------------------------------------------------------------------
# Both modes together, with the functions of torch that are replaced.


@contextlib.contextmanager
def fake_device(
    mode: FakeDeviceMode, shown: ShownAsCuda, on_resize: Callable[[Any, int], None]
) -> Iterator[None]:
    """Between the two modes, everything in Python computes with tensors without memory.

    Args:
        mode: What operators come to.
        shown: What Python sees.
        on_resize: Is called before the memory behind a tensor is resized.
    """
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        replaced = (*_dispatch(), *_makers(), *_replacements(shown, on_resize))
        for owner, name, value in replaced:
            enter(mock.patch.object(owner, name, value))
        for kinds in _FOREACH_TYPES:
            kinds.append(FakeTensor)
            stack.callback(kinds.remove, FakeTensor)
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        enter(backward_under(shown))
        enter(torch.serialization.safe_globals([_empty_again]))
        _in_force.append(mode)
        stack.callback(_in_force.remove, mode)
        enter(mode)
        enter(shown)
        mode.learn_accumulation()
        yield


@contextlib.contextmanager
def in_another_thread(mode: FakeDeviceMode, shown: ShownAsCuda) -> Iterator[None]:
    """What is in force between these modes, in a thread of the script."""
    with mode.entered_here(), shown:
        yield


def _foreach_types() -> list[list[Any]]:
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    return [optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types]


_FOREACH_TYPES = _foreach_types()


def _dispatch() -> Iterator[tuple[Any, str, Any]]:
    """Where C++ asks for the device of a tensor without memory."""
    plain_dispatch: Any = FakeTensor.__torch_dispatch__

    def dispatch(
        cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:
            return _inner_device(args[0])
        return plain_dispatch(func, types, args, kwargs or {})

    plain_mode: Any = FakeTensorMode.__torch_dispatch__

    def dispatch_mode(
        mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Of other modes than ours: a step that is captured has one of its own.
        if func is _DEVICE:
            return _inner_device(args[0])
        if kwargs and kwargs.get("device") == _INNER:
            kwargs = {**kwargs, "device": _SHOWN}
        return plain_mode(mode, func, types, args, kwargs)

    yield FakeTensor, "__torch_dispatch__", classmethod(dispatch)
    yield FakeTensorMode, "__torch_dispatch__", dispatch_mode


def _makers() -> Iterator[tuple[Any, str, Any]]:
    """What makes tensors that wrap others: fake ones, DTensors, results of collectives."""
    plain_make = torch.Tensor._make_subclass

    def make(*args: Any, **kwargs: Any) -> Any:
        keys = kwargs.get("device_for_backend_keys")
        if keys is not None and keys.type == "cuda":
            kwargs["device_for_backend_keys"] = _INNER
        return plain_make(*args, **kwargs)

    plain_wrap: Any = torch.Tensor._make_wrapper_subclass

    def make_wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _INNER
        return plain_wrap(*[_INNER if _is_cuda(x) else x for x in args], **kwargs)

    plain_tracing = functional_collectives._are_we_tracing

    def is_tracing() -> bool:
        # A rehearsal runs eagerly: what a collective gives is waited for when it is used.
        mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
        if isinstance(mode, FakeDeviceMode) and get_proxy_mode() is None:
            return False
        return plain_tracing()

    yield torch.Tensor, "_make_subclass", staticmethod(make)
    yield torch.Tensor, "_make_wrapper_subclass", staticmethod(make_wrapper)
    yield functional_collectives, "_are_we_tracing", is_tracing


def _replacements(
    shown: ShownAsCuda, on_resize: Callable[[Any, int], None]
) -> Iterator[tuple[Any, str, Any]]:
    plain_device = torch.Tensor.device.__get__

    def outer_device(tensor: Any) -> torch.device:
        # Of DTensors and the like, where no function mode is on.
        own: torch.device = plain_device(tensor)
        return shown.shown if own == _INNER else own

    def device(tensor: Any) -> torch.device:
        if tensor.fake_mode.in_kernel_invocation:
            return torch.device("meta")
        own: torch.device = tensor.fake_device
        return shown.shown if own.type == "cuda" else own

    def record_stream(tensor: torch.Tensor, s: Any) -> None:
        shown.record_stream(tensor, s)

    plain_list: Any = FakeTensor.tolist

    def tolist(tensor: Any) -> Any:
        # A fake tensor's own method reads one element after the other.
        if not is_rehearsed(tensor):
            return plain_list(tensor)
        return shown.read("tolist", tensor)

    yield FakeTensor, "tolist", tolist
    yield torch.Tensor, "device", property(outer_device)
    yield torch.Tensor, "is_cuda", property(is_device_tensor)
    yield FakeTensor, "device", property(device)
    yield FakeTensor, "data_ptr", _address
    yield FakeTensor, "__deepcopy__", _deepcopy
    yield from _replaced_pickling()
    yield jagged_attention, "_select_sdp_backend", _jagged_attention
    # Refuses other streams than its own before a mode is asked.
    yield torch.Tensor, "record_stream", record_stream
    yield from _replaced_storage(on_resize)
    yield from _replaced_kinds()
    yield from _replaced_defaults(shown)
    yield fake_tensor, "init_gpu_context", lambda *args: None
    yield torch._C, "_get_accelerator", lambda: torch.device("cuda")
    # By this name, other libraries ask whether a model is being traced.
    yield torch._subclasses, "FakeTensor", _FakeToTorch


def _replaced_defaults(shown: ShownAsCuda) -> Iterator[tuple[Any, str, Any]]:
    plain_default = torch.set_default_device

    def set_default_device(device: Any) -> None:
        # torch's own way comes after every function mode, where it is C++ that makes them.
        shown.is_default = device is not None and _is_cuda(device)
        plain_default(None if shown.is_default else device)

    plain_get = torch.get_default_device

    def get_default_device() -> torch.device:
        return shown.shown if shown.is_default else plain_get()

    yield torch, "set_default_device", set_default_device
    yield torch, "get_default_device", get_default_device


def _replaced_kinds() -> Iterator[tuple[Any, str, Any]]:
    """Of tensors that users and torch derive."""
    plain_subclass = torch.Tensor.as_subclass

    def as_subclass(tensor: Any, cls: Any) -> Any:
        if not isinstance(tensor, FakeTensor) or issubclass(FakeTensor, cls):
            return plain_subclass(tensor, cls)
        # C++ refuses a second Python object for one without memory.
        alias: Any = torch.ops.aten.alias.default(tensor)
        alias.__class__ = cls if issubclass(cls, FakeTensor) else _both_kinds(cls)
        return alias

    plain_int: Any = FakeTensor.get_nested_int

    def nested_int(tensor: Any, *, coeff: Any = 1) -> Any:
        # Eager nested tensors number their ragged sizes; a trace has symbols for them.
        if not is_rehearsed(tensor):
            return plain_int(tensor, coeff=coeff)
        if tensor.nested_int_memo is None:
            tensor.nested_int_memo = torch.SymInt(NestedIntNode(next(_ragged), 1))
        return tensor.nested_int_memo * coeff

    yield torch.Tensor, "as_subclass", as_subclass
    yield FakeTensor, "get_nested_int", nested_int


def _replaced_storage(
    on_resize: Callable[[Any, int], None],
) -> Iterator[tuple[Any, str, Any]]:
    plain_resize = torch.UntypedStorage.resize_

    def resize(storage: Any, nbytes: int) -> Any:
        if storage.device.type == "meta":
            on_resize(storage, int(nbytes))
        return plain_resize(storage, nbytes)

    plain_address = torch.UntypedStorage.data_ptr

    def address(storage: Any) -> int:
        if storage.device.type != "meta":
            return int(plain_address(storage))
        return _addresses.of(storage)

    plain_swap = torch.utils.swap_tensors

    def swap(one: torch.Tensor, other: torch.Tensor) -> None:
        try:
            plain_swap(one, other)
        except RuntimeError:  # C++ code holds it
            if isinstance(one, FakeTensor) and isinstance(other, FakeTensor):
                one.data = other  # as DDP holds a parameter
            else:
                _exchange(one, other)

    yield torch.UntypedStorage, "resize_", resize
    yield torch.UntypedStorage, "data_ptr", address
    yield torch.utils, "swap_tensors", swap


def _exchange(one: Any, other: Any) -> None:
    """Exchange two tensors, also where a graph holds them.

    ``weight_norm`` computes a weight before its module is moved; the gradient of that one
    is never needed.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


_ragged = itertools.count(1 << 20)  # above those that torch counts by itself


class _Addresses:
    """Addresses for memory that does not exist, above those of the host.

    Libraries tell parameters apart by them, and find those that share memory.
    """

    def __init__(self) -> None:
        self._next = 1 << 60

    def of(self, storage: Any) -> int:
        """An address that no other memory has; another one when it has grown."""
        nbytes = storage.nbytes()
        if not nbytes:
            return 0
        address, room = getattr(storage, "shown_address", (0, 0))
        if nbytes > room:
            address = self._next
            storage.shown_address = address, nbytes
            self._next += -(-nbytes // 512) * 512  # as CUDA's blocks are aligned
        return int(address)


_addresses = _Addresses()


def _address(tensor: Any) -> int:
    start = _addresses.of(tensor.untyped_storage())
    return start and start + tensor.storage_offset() * tensor.element_size()


class _IsFakeToTorch(type(FakeTensor)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        """A rehearsed tensor is a real one to all but torch itself."""
        if not isinstance(instance, FakeTensor):
            return False
        return not is_rehearsed(instance) or is_torch_code(sys._getframe(1).f_code)


class _FakeToTorch(FakeTensor, metaclass=_IsFakeToTorch):
    pass


def _deepcopy(tensor: Any, memo: dict[int, Any]) -> Any:
    """As torch copies other tensors; a fake one's attributes would have the mode copied."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    with torch.no_grad():
        copied = tensor.detach().clone()
    copied.requires_grad_(tensor.requires_grad)
    if getattr(tensor, "_is_param", False):
        copied._is_param = True
    memo[id(tensor)] = copied
    if tensor.grad is not None:
        copied.grad = _deepcopy(tensor.grad, memo)
    return copied


_plain_jagged_attention: Any = jagged_attention._select_sdp_backend


def _jagged_attention(query: Any, *args: Any) -> Any:
    """Which kernel computes attention of rows of different lengths."""
    try:
        backend = _plain_jagged_attention(query, *args)
    except torch.AcceleratorError:  # a build for CUDA asks the GPU, which is not there
        backend = SDPBackend.ERROR
    if backend is SDPBackend.ERROR and is_device_tensor(query):
        raise UsageError(
            "scaled_dot_product_attention of nested tensors (layout=torch.jagged) cannot "
            "be rehearsed: its kernels are CUDA's alone. Use flex_attention with a mask of "
            "the rows, or padded tensors."
        )
    return backend


def _replaced_pickling() -> Iterator[tuple[Any, str, Any]]:
    """A tensor is pickled as its size and type, and so comes back."""
    plain: Any = FakeTensor.__reduce_ex__

    def reduce(tensor: Any, protocol: Any) -> Any:
        is_copied = sys._getframe(1).f_code is copy.copy.__code__  # has the same memory
        if is_copied or not is_rehearsed(tensor):
            return plain(tensor, protocol)
        place = tensor.fake_device.type
        is_parameter = getattr(tensor, "_is_param", False)
        described = (tuple(tensor.shape), tensor.stride(), tensor.dtype, place)
        return _empty_again, (*described, tensor.requires_grad, is_parameter)

    yield FakeTensor, "__reduce_ex__", reduce


def _empty_again(
    size: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    requires_grad: bool,  # pickled by its place
    is_parameter: bool,
) -> Any:
    if not _in_force:
        raise UsageError(
            "this file was written while a script was rehearsed: its tensors have no "
            "values. Save it again in a real run."
        )
    tensor: Any = torch.empty_strided(size, stride, dtype=dtype, device=device)
    if not is_fake_tensor(tensor):
        return tensor
    tensor.requires_grad_(requires_grad)
    if is_parameter:
        tensor._is_param = True
    return tensor


_in_force: list[FakeDeviceMode] = []
