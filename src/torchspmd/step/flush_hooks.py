"""Reading state flushes pending updates: methods of the user's objects flush first.

While an update is pending, methods of the modules, optimizers and scalers of a step are
wrapped. Hooks of torch would not do, except for forward pre-hooks: a flush removes what
caused it, and torch iterates over its tables of ``state_dict``, ``load_state_dict`` and
``step`` hooks themselves, so that an entry that removes itself ends the call with
"OrderedDict mutated during iteration" where the user has hooks too.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from torchspmd import _torch
from torchspmd.errors import UsageError
from torchspmd.step.capture.inventory import Inventory

Owner = nn.Module | Optimizer | GradScaler

# What reads or changes parameters and states from outside the step.
_OF_MODULES = (
    "state_dict",
    "train",  # also what eval() calls
    "named_modules",  # what a parent's parameters() calls
    "named_parameters",
    "named_buffers",
    "get_parameter",
    "get_buffer",
    "apply",
    "_apply",  # what to(), double() and the like call
    "forward",  # called without the module's hooks
)
_OF_OPTIMIZERS = ("state_dict", "add_param_group", "step")
_OF_GRADIENTS = ("zero_grad",)  # a pending update would bring them back
_OF_SCALERS = ("get_scale", "state_dict", "scale", "unscale_", "step", "update")
_LOADS = ("load_state_dict",)
_LOADS_OF_MODULES = ("load_state_dict", "_load_from_state_dict")  # called by a parent's
# What copy and pickle call, where a class has it.
_COPIES = ("__deepcopy__", "__copy__", "__reduce_ex__", "__getstate__")

_is_paused = ContextVar("whether a compiled step itself reads state", default=False)


@contextlib.contextmanager
def without_flushing() -> Iterator[None]:
    """Inside, nothing flushes: a compiled step itself reads the objects of a call."""
    token = _is_paused.set(True)
    try:
        yield
    finally:
        _is_paused.reset(token)


_in_backward = [0]  # how many blocks below are open; threads of autograd see no context


@contextlib.contextmanager
def without_flushing_in_backward() -> Iterator[None]:
    """The same, also for what backward calls in its own threads, as a recomputation."""
    _in_backward[0] += 1
    try:
        with without_flushing():
            yield
    finally:
        _in_backward[0] -= 1


def _flushes() -> bool:
    """Whether a read flushes here."""
    return not (_is_paused.get() or (_in_backward[0] and _torch.graph_task() != -1))


def modules_of(inventory: Inventory) -> dict[nn.Module, None]:
    """All modules of a call, in order."""
    with without_flushing():
        roots = [root for _, root in inventory.modules]
        return {each: None for root in roots for each in root.modules()}


def flush_on_access(
    inventory: Inventory,
    flush: Callable[[], None],
    flush_before_load: Callable[[], None],
    *,
    leaves_gradients: bool,
) -> contextlib.ExitStack:
    """Have the objects of a call flush before anything reads or changes their state.

    Returns:
        What puts everything back when it is closed.
    """
    # A model that runs under torch.compile flushes too; it must not be traced.
    flush = torch.compiler.disable(flush)
    flush_before_load = torch.compiler.disable(flush_before_load)
    hooks = contextlib.ExitStack()
    layers: list[WrappedMethod | WatchedTable] = []  # many: a callback each takes long
    hooks.callback(_remove_all, layers)

    def wrap(owner: Owner, names: tuple[str, ...], before: Callable[[], None]) -> None:
        layers.extend(WrappedMethod(owner, name, before) for name in names)

    def wrap_copies(owner: Owner) -> None:
        wrap(owner, tuple(name for name in _COPIES if hasattr(owner, name)), flush)

    for module in modules_of(inventory):
        wrap(module, _OF_MODULES, flush)
        wrap(module, _LOADS_OF_MODULES, flush_before_load)
        wrap_copies(module)
        hook = module.register_forward_pre_hook(_FlushHook(flush), prepend=True)
        hooks.callback(hook.remove)
        for name in ("_parameters", "_buffers"):
            if vars(module)[name]:
                layers.append(WatchedTable(module, name, flush_before_load))
    for _, optimizer in inventory.optimizers:
        wrap(optimizer, _OF_OPTIMIZERS, flush)
        wrap(optimizer, _OF_GRADIENTS if leaves_gradients else (), flush)
        wrap(optimizer, _LOADS, flush_before_load)
        wrap_copies(optimizer)
    for _, scaler in inventory.scalers:
        wrap(scaler, _OF_SCALERS, flush)
        wrap(scaler, _LOADS, flush_before_load)
        wrap_copies(scaler)
    return hooks


def _remove_all(layers: Sequence["WrappedMethod | WatchedTable"]) -> None:
    for layer in reversed(layers):
        layer.remove()


class WrappedMethod:
    """A method of a user's object that calls something first; several may stack up.

    Attributes:
        own: What the object itself had in this place, if anything.
    """

    belongs_to_compiled_step = True  # guards see what the user had in its place

    def __init__(self, owner: Owner, name: str, before: Callable[[], None]) -> None:
        method: Any = getattr(owner, name, None)
        is_ours = isinstance(method, WrappedMethod)
        self._method: Any = method._method if is_ours else method
        self._owner, self._name, self._before = owner, name, before
        self.own = vars(owner).get(name)
        vars(owner)[name] = self

    def remove(self) -> None:
        """Put back what was there."""
        _take_out(self, self._owner, self._name)

    @property
    def __wrapped__(self) -> Any:
        return self._method if self.own is None else self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Flush, then run the method."""
        if _flushes() and not self._changes_nothing(*args, **kwargs):
            self._before()
        return self.__wrapped__(*args, **kwargs)

    def _changes_nothing(self, *args: Any, **kwargs: Any) -> bool:
        """Whether it is ``train()`` of a model that trains: many call it in every step."""
        if self._name != "train" or not isinstance(self._owner, nn.Module):
            return False
        mode = kwargs.get("mode", args[0] if args else True)
        with without_flushing():
            return all(module.training is mode for module in self._owner.modules())

    def __getattr__(self, name: str) -> Any:
        # Marks on the method, such as the one that a learning-rate scheduler looks for.
        return getattr(self.__wrapped__, name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy(type(self._owner).__name__)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        _refuse_copy(type(self._owner).__name__)


class WatchedTable(dict[str, Any]):
    """Stands for a module's table of tensors, and flushes before one is taken from it.

    A method of the user's that reads a parameter and then calls a layer would otherwise
    see the old value of the one and the new value of the other. It flushes as before a
    load, which goes through these tables, too. Several may stack up.

    Attributes:
        own: The table that it stands for, which all changes go to.
    """

    belongs_to_compiled_step = True

    def __init__(
        self, module: nn.Module, name: str, before: Callable[[], None]
    ) -> None:
        self.own: dict[str, Any] = vars(module)[name]
        super().__init__(self.own)
        self._module, self._name, self._before = module, name, before
        vars(module)[name] = self

    def remove(self) -> None:
        """Put the table back."""
        _take_out(self, self._module, self._name)

    def __getitem__(self, key: str) -> Any:
        return self._flushed()[key]

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        return self._flushed().get(key, default)

    def values(self) -> Any:
        """As of a dict."""
        return self._flushed().values()

    def items(self) -> Any:
        """As of a dict."""
        return self._flushed().items()

    def __setitem__(self, key: str, value: Any) -> None:
        self._flushed()[key] = value
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        del self._flushed()[key]
        super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        """As of a dict."""
        super().pop(key, None)
        return self._flushed().pop(key, *default)

    def _flushed(self) -> dict[str, Any]:
        """The table that it stands for, once all updates are made."""
        if _flushes():
            self._before()
        return self.own

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy(type(self._module).__name__)


def _take_out(layer: WrappedMethod | WatchedTable, owner: object, name: str) -> None:
    """Put back what a layer stands for, also from below others that were put on top.

    Below a wrapper of the user's it stays, and does nothing any more.
    """
    top: Any = vars(owner).get(name)
    if top is layer and layer.own is None:
        del vars(owner)[name]
    elif top is layer:
        vars(owner)[name] = layer.own
    while isinstance(top, type(layer)):
        if top.own is layer:
            top.own = layer.own
        top = top.own


class _FlushHook:
    """Flushes before an eager call of the module, and before the user's own pre-hooks."""

    belongs_to_compiled_step = True  # no guard of a program

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush

    def __call__(self, module: nn.Module, args: Any) -> None:
        if _flushes():
            self._flush()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse_copy("module")


def _refuse_copy(owner: str) -> NoReturn:
    raise UsageError(
        f"The {owner} cannot be copied or pickled while a compiled step has a pending "
        "update: call flush() of the step first, or pass last_train_step=True."
    )
