"""Everything that shows or changes a model from outside a step, made to flush first."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from torchspmd.errors import UsageError
from torchspmd.step.capture.inventory import Inventory

Owner = nn.Module | Optimizer | GradScaler

# What shows or changes parameters and states from outside the step.
_OF_MODULES = (
    "state_dict",
    "load_state_dict",
    "_load_from_state_dict",  # what a parent's load_state_dict() calls
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
_OF_OPTIMIZERS = ("state_dict", "load_state_dict", "add_param_group", "step")
_OF_GRADIENTS = ("zero_grad",)  # one that comes later would come back
_OF_SCALERS = (
    *("get_scale", "state_dict", "load_state_dict"),
    *("scale", "unscale_", "step", "update"),
)
# A copy would miss the update, and a shallow one would have the methods of the original.
_REFUSED_OF_MODULES = ("__getstate__",)
_REFUSED_OF_OPTIMIZERS = ("__deepcopy__", "__reduce_ex__", "__getstate__")


_is_own = ContextVar("whether a compiled step itself looks", default=False)


@contextlib.contextmanager
def own_look() -> Iterator[None]:
    """Inside, nothing flushes: a step looks at the objects of a call."""
    token = _is_own.set(True)
    try:
        yield
    finally:
        _is_own.reset(token)


def modules_of(inventory: Inventory) -> dict[nn.Module, None]:
    """All modules of a call, in order."""
    with own_look():
        roots = [root for _, root in inventory.modules]
        return {each: None for root in roots for each in root.modules()}


def watch(
    inventory: Inventory,
    flush: Callable[[], None],
    before_load: Callable[[], None],
    *,
    pending_gradients: bool,
) -> "list[Watched | Hook | Refused]":
    """Have the modules and optimizers of a call flush before anything looks at them."""
    # A model that runs under torch.compile flushes too; it must not be traced.
    flush, before_load = (
        torch.compiler.disable(flush),
        torch.compiler.disable(before_load),
    )

    def watch_methods(owner: Owner, names: Iterable[str]) -> list[Watched]:
        loads = {
            "load_state_dict": before_load,
            "_load_from_state_dict": before_load,
        }
        return [Watched(owner, name, loads.get(name, flush)) for name in names]

    watched: list[Watched | Hook | Refused] = []
    for module in modules_of(inventory):
        watched += watch_methods(module, _OF_MODULES)
        hook = module.register_forward_pre_hook(_FlushHook(flush), prepend=True)
        watched.append(Hook(hook))
        watched += [Refused(module, name) for name in _REFUSED_OF_MODULES]
    for _, optimizer in inventory.optimizers:
        watched += watch_methods(optimizer, _OF_OPTIMIZERS)
        watched += watch_methods(optimizer, _OF_GRADIENTS if pending_gradients else ())
        watched += [Refused(optimizer, name) for name in _REFUSED_OF_OPTIMIZERS]
    for _, scaler in inventory.scalers:
        watched += watch_methods(scaler, _OF_SCALERS)
    return watched


class _StandIn:
    """Something of ours in the place of a user's method; several steps may stack up."""

    belongs_to_compiled_step = True  # guards look at what it stands for

    def __init__(self, owner: Owner, name: str) -> None:
        self._owner, self._name = owner, name
        self.own = vars(owner).get(
            name
        )  # what stood there before, of the object itself
        vars(owner)[name] = self

    def remove(self) -> None:
        """Put back what was there, also from below what others put on top since."""
        top = vars(self._owner).get(self._name)
        if top is self and self.own is None:
            del vars(self._owner)[self._name]
        elif top is self:
            vars(self._owner)[self._name] = self.own
        else:
            _take_out(top, self)


def _take_out(top: object, gone: _StandIn) -> None:
    """Let the stand-in above another one stand where that stood.

    Below a wrapper of the user's it stays, and does nothing any more.
    """
    while isinstance(top, _StandIn):
        if top.own is gone:
            top.own = gone.own
            return
        top = top.own


class Watched(_StandIn):
    """A method of a user's object that flushes before it runs."""

    def __init__(self, owner: Owner, name: str, flush: Callable[[], None]) -> None:
        method: Any = getattr(owner, name)
        self._method: Any = method._method if isinstance(method, Watched) else method
        self._flush = flush
        super().__init__(owner, name)

    @property
    def __wrapped__(self) -> Any:
        return self._method if self.own is None else self.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Flush, then run the method."""
        if not (_is_own.get() or self._changes_nothing(*args, **kwargs)):
            self._flush()
        return self.__wrapped__(*args, **kwargs)

    def _changes_nothing(self, *args: Any, **kwargs: Any) -> bool:
        """Whether it is ``train()`` of a model that trains: many call it in every step."""
        if self._name != "train" or not isinstance(self._owner, nn.Module):
            return False
        mode = kwargs.get("mode", args[0] if args else True)
        with own_look():
            return all(module.training is mode for module in self._owner.modules())

    def __getattr__(self, name: str) -> Any:
        # Marks on the method, such as the one that a learning-rate scheduler looks for.
        return getattr(self.__wrapped__, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _copied(type(self._owner).__name__)

    def __deepcopy__(self, memo: Any) -> Any:
        raise _copied(type(self._owner).__name__)


class _FlushHook:
    """Flushes before an eager call of the module."""

    belongs_to_compiled_step = True  # no guard of a program

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._flush()

    def __deepcopy__(self, memo: Any) -> Any:
        raise _copied("module")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _copied("module")


class Refused(_StandIn):
    """A way to copy a module or an optimizer, closed."""

    def __call__(self, *args: Any) -> Any:
        """Say so."""
        raise _copied(type(self._owner).__name__)


class Hook:
    """A hook among the watched methods."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def remove(self) -> None:
        """Take it away."""
        self._handle.remove()


def _copied(owner: str) -> UsageError:
    return UsageError(
        f"The {owner} cannot be copied or pickled while a compiled step has a pending "
        "update: call flush() of the step first, or pass last_train_step=True."
    )
