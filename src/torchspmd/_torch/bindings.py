"""Operators as Python calls them: a method of a tensor, a function of ``torch``.

``torch.ops.aten.view.default(x, sizes)`` reads its arguments by the operator's schema, in
about half a microsecond more than ``x.view(sizes)``, which was generated for it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from torchspmd._torch.fake_results import failures_not_logged
from torchspmd._torch.regions import leaves_of, map_tree


class Binding(NamedTuple):
    """What calls an operator.

    Attributes:
        name: Of the method of the first argument, or of the function of ``torch``.
        is_method: Whether it is a method.
        unpacks: Whether the numbers of its one list are arguments of their own.
    """

    name: str
    is_method: bool = True
    unpacks: bool = False

    @property
    def function(self) -> Callable[..., Any]:
        """That of ``torch``; of a method, one that takes the tensor too."""
        holder = torch.Tensor if self.is_method else torch
        return getattr(holder, self.name)

    def call(self, *args: Any, **options: Any) -> Any:
        """Call it with the operator's arguments."""
        if self.unpacks:
            args = args[0], *args[1]
        return self.function(*args, **options)


_known: dict[Any, Binding | None] = {}
_ITEM = torch.ops.aten._local_scalar_dense.default


def binding_of(
    operator: Any, args: Sequence[Any], options: Mapping[str, Any]
) -> Binding | None:
    """What calls an operator with such arguments; None where nothing is known to.

    Which overload a binding takes follows from the kinds of its arguments. So each is
    called once with such arguments, without values, and must come to the same operators
    with the same arguments.
    """
    if not isinstance(operator, OpOverload) or operator.namespace != "aten":
        return None
    if next(leaves_of(torch.Tensor, list(args[:1])), None) is None:
        return None  # what makes tensors of its own asks what surrounds the call
    if operator is _ITEM:  # cannot be called without values
        return Binding("item")
    key = operator, _kinds(args), _kinds(options)
    if key not in _known:
        _known[key] = _find(operator, args, options)
    return _known[key]


def _find(
    operator: OpOverload, args: Sequence[Any], options: Mapping[str, Any]
) -> Binding | None:
    asked = None
    for binding in _candidates(operator._opname, args):
        asked = asked or _calls_of(operator, args, options)
        if asked is None:
            return None
        if _calls_of(binding.call, args, options) == asked:
            return binding
    return None


def _candidates(name: str, args: Sequence[Any]) -> Iterator[Binding]:
    if isinstance(getattr(torch.Tensor, name, None), MethodDescriptorType):
        if len(args) == 2 and isinstance(args[1], (list, tuple)) and args[1]:
            yield Binding(name, unpacks=True)
        yield Binding(name)
    if isinstance(getattr(torch, name, None), BuiltinFunctionType):
        yield Binding(name, is_method=False)


def _kinds(value: Any) -> Any:
    """What the choice of an overload can depend on."""
    if isinstance(value, torch.Tensor):
        return torch.Tensor, value.ndim == 0
    if isinstance(value, (list, tuple)):  # a long one is as one of three
        return type(value), tuple(dict.fromkeys(map(_kinds, value))), len(value[:3])
    if isinstance(value, Mapping):
        return tuple((name, _kinds(each)) for name, each in value.items())
    return type(value)


def _calls_of(target: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """The operators that a call comes to, with their arguments; None where it fails."""
    modes = {
        each.fake_mode: None
        for each in leaves_of(torch.Tensor, (args, options))
        if hasattr(each, "fake_mode")
    }
    if len(modes) != 1:
        return None
    (mode,) = modes
    try:
        with failures_not_logged(), torch.no_grad(), mode, _Recorder() as recorder:
            target(*args, **options)
    except Exception:
        # An operator that needs values, or a binding with other arguments.
        return None
    return recorder.calls


class _Recorder(TorchDispatchMode):
    """Notes the operators that are called, with arguments that compare by value."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.calls.append((func, map_tree(_by_value, (args, kwargs))))
        return func(*args, **kwargs)


def _by_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return id(value)
    return repr(value)
