"""Numbers that a step reads from tensors while it is traced, and what it does with them."""

import contextlib
import functools
import math
import operator
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import fx

SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)


@contextlib.contextmanager
def real_tensors() -> Iterator[None]:
    """Inside, operators run on tensors with values, whatever is traced outside."""
    from torch.utils._python_dispatch import _disable_current_modes

    native: Any = torch._C
    traced = native._get_tracing_state()  # of torch.jit.trace, in this thread
    native._set_tracing_state(None)
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
            yield
    finally:
        native._set_tracing_state(traced)


def stand_in(number: Any, made: Any) -> Any:
    """Let a number stand for another one in the graph that is being traced."""
    from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_proxy_slot

    tracer = _tracer()
    set_proxy_slot(number, tracer, get_proxy_slot(made, tracer))
    return number


def copy_number(node: fx.Node, args: tuple[Any, ...]) -> Any:
    """A node that computes a number, in the graph that is being traced; its value as is.

    Without computing it: a symbolic expression takes much longer to make than a node.
    """
    from torch.fx.experimental.proxy_tensor import set_meta

    value = node.meta["val"]
    return _track(value, set_meta(_call(node.target, args), value))


def extreme(choose: Any, first: Any, second: Any) -> Any:
    """``max`` or ``min`` of two numbers as a node of the graph, without choosing now."""
    if not isinstance(first, SYMBOLIC) and not isinstance(second, SYMBOLIC):
        return choose(first, second)
    from torch.fx.experimental.proxy_tensor import set_meta

    symbolic = torch.sym_max if choose is max else torch.sym_min
    # Not torch's own node: that one has another opinion about NaN.
    proxy = _call(choose, (first, second))
    with _untraced():
        value = symbolic(first, second)
    return (
        _track(value, set_meta(proxy, value)) if isinstance(value, SYMBOLIC) else value
    )


@contextlib.contextmanager
def extremes_in_graph() -> Iterator[None]:
    """``max`` and ``min`` of torch's optimizers become nodes instead of choices."""
    from torch.optim import _adafactor, asgd

    names = ("max", "min")
    tables = [vars(module) for module in (_adafactor, asgd)]
    # Of each what is there already: an optimizer may step another one.
    before = [{name: t[name] for name in names if name in t} for t in tables]
    for table in tables:
        table["max"] = lambda first, second: extreme(max, first, second)
        table["min"] = lambda first, second: extreme(min, first, second)
    try:
        yield
    finally:
        for table, held in zip(tables, before, strict=True):
            for name in names:
                del table[name]
            table.update(held)


# Functions of ``math`` that torch has for symbols too.
_OF_MATH = (
    *("acos", "asin", "atan", "cos", "cosh", "log2"),
    *("sin", "sinh", "sqrt", "tan", "tanh"),
)


@contextlib.contextmanager
def math_in_graph() -> Iterator[None]:
    """``math.sqrt`` and others of symbols become nodes instead of their values now."""
    before = {name: getattr(math, name) for name in _OF_MATH}
    for name, own in before.items():
        setattr(math, name, functools.partial(_of_math, own, f"_sym_{name}"))
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(math, name, own)


def _of_math(own: Any, name: str, number: Any, /) -> Any:
    return getattr(torch, name)(number) if isinstance(number, SYMBOLIC) else own(number)


# ----------------------------------------------------------------------------
# Symbols in Python code of the user's, which expects floats and ints there.

_PLAIN: tuple[tuple[Any, type[Any]], ...] = (
    (torch.SymFloat, float),
    (torch.SymInt, int),
)
# Torch has other results for them than Python: 2.0 // 0.4 is 4.0, floor(2.0 / 0.4) is 5.
_DIVISIONS = ("floordiv", "mod", "divmod")


@contextlib.contextmanager
def plain_for(is_user: Callable[[FrameType], bool]) -> Iterator[None]:
    """Let symbols pass for the numbers that they stand for where a user's code asks.

    ``isinstance(lr, float)`` is true there. What a graph cannot follow (text, hashes,
    copies, divisions with a remainder) gets the value of now, which the graph then assumes:
    another value is another program.

    Args:
        is_user: Whether the code of a frame is the user's, and not that of a tracer.
    """
    with contextlib.ExitStack() as stack:
        for kind, plain in _PLAIN:
            for name, method in _plain_methods(kind, plain, is_user).items():
                before = vars(kind).get(name)
                if before is None:
                    stack.callback(delattr, kind, name)
                else:
                    stack.callback(setattr, kind, name, before)
                setattr(kind, name, method)
        yield


def _plain_methods(
    kind: Any, plain: type[Any], is_user: Callable[[FrameType], bool]
) -> dict[str, Callable[..., Any]]:
    native_repr, native_get = kind.__repr__, kind.__getattribute__

    def get(self: Any, name: str) -> Any:
        if name == "__class__" and is_user(sys._getframe(1)):
            return plain
        return native_get(self, name)

    def text(self: Any) -> str:
        is_asked = is_user(sys._getframe(1))
        return repr(plain(self)) if is_asked else str(native_repr(self))

    def formatted(self: Any, spec: str) -> str:
        is_asked = is_user(sys._getframe(1))
        return format(plain(self) if is_asked else str(native_repr(self)), spec)

    methods: dict[str, Callable[..., Any]] = {
        "__getattribute__": get,
        "__repr__": text,
        "__format__": formatted,
        "__reduce_ex__": lambda self, protocol: (plain, (plain(self),)),
    }
    if plain is float:
        methods["__round__"] = lambda self, *digits: round(float(self), *digits)
    for name in _DIVISIONS:
        choose = divmod if name == "divmod" else getattr(operator, name)
        for prefix in ("", "r"):
            native = getattr(kind, f"__{prefix}{name}__", None)
            methods[f"__{prefix}{name}__"] = _division(choose, native, bool(prefix))
    return methods


def _division(choose: Any, native: Any, is_swapped: bool) -> Callable[..., Any]:
    def divide(self: Any, other: Any) -> Any:
        whole = isinstance(self, torch.SymInt) and isinstance(
            other, (int, torch.SymInt)
        )
        if whole and native is not None:
            return native(self, other)
        if not isinstance(other, (int, float, *SYMBOLIC)):
            return NotImplemented
        pair = _value(self), _value(other)
        return choose(*(reversed(pair) if is_swapped else pair))

    return divide


def _value(number: Any) -> Any:
    """The number itself; of a symbol its value of now, which is assumed from here on."""
    for kind, plain in _PLAIN:
        if isinstance(number, kind):
            return plain(number)
    return number


def _call(target: Any, args: tuple[Any, ...]) -> Any:
    from torch.fx.experimental.proxy_tensor import get_proxy_slot

    tracer = _tracer()
    nodes = tuple(
        get_proxy_slot(arg, tracer).force().node if isinstance(arg, SYMBOLIC) else arg
        for arg in args
    )
    return fx.Proxy(tracer.create_node("call_function", target, nodes, {}), tracer)


def _track(value: Any, proxy: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import set_proxy_slot
    from torch.utils._thunk import Thunk

    set_proxy_slot(value, _tracer(), Thunk(lambda: proxy))
    return value


def _tracer() -> Any:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    return mode.tracer


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing():
        yield
