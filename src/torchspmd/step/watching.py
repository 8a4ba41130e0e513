"""Everything that shows or changes a model from outside a step, made to flush first."""

from collections.abc import Callable, Iterable
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
    "train",  # also what eval() calls
    "named_parameters",
    "named_buffers",
    "get_parameter",
    "get_buffer",
    "apply",
    "_apply",  # what to(), double() and the like call
    "forward",  # called without the module's hooks
)
_OF_OPTIMIZERS = ("state_dict", "load_state_dict", "add_param_group", "step")
_OF_SCALERS = (
    *("get_scale", "state_dict", "load_state_dict"),
    *("scale", "unscale_", "step", "update"),
)
# A copy would miss the update, and a shallow one would have the methods of the original.
_REFUSED_OF_MODULES = ("__getstate__",)
_REFUSED_OF_OPTIMIZERS = ("__deepcopy__", "__reduce_ex__", "__getstate__")


def watch(
    inventory: Inventory, flush: Callable[[], None], before_load: Callable[[], None]
) -> "list[Watched | Hook | Refused]":
    """Have the modules and optimizers of a call flush before anything looks at them."""
    # A model that runs under torch.compile flushes too; it must not be traced.
    flush, before_load = (
        torch.compiler.disable(flush),
        torch.compiler.disable(before_load),
    )

    def watch_methods(owner: Owner, names: Iterable[str]) -> list[Watched]:
        loads = {"load_state_dict": before_load}
        return [Watched(owner, name, loads.get(name, flush)) for name in names]

    watched: list[Watched | Hook | Refused] = []
    modules = {each: None for _, root in inventory.modules for each in root.modules()}
    for module in modules:
        watched += watch_methods(module, _OF_MODULES)
        hook = module.register_forward_pre_hook(_FlushHook(flush), prepend=True)
        watched.append(Hook(hook))
        watched += [Refused(module, name) for name in _REFUSED_OF_MODULES]
    for _, optimizer in inventory.optimizers:
        watched += watch_methods(optimizer, _OF_OPTIMIZERS)
        watched += [Refused(optimizer, name) for name in _REFUSED_OF_OPTIMIZERS]
    for _, scaler in inventory.scalers:
        watched += watch_methods(scaler, _OF_SCALERS)
    return watched


class Watched:
    """A method of a user's object that flushes before it runs."""

    def __init__(self, owner: Owner, name: str, flush: Callable[[], None]) -> None:
        self._owner, self._name, self._flush = owner, name, flush
        self._own = vars(owner).get(name)  # a method that the user put there
        self._method = self.__wrapped__ = getattr(owner, name)
        vars(owner)[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Flush, then run the method."""
        self._flush()
        return self._method(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # Marks on the method, such as the one that a learning-rate scheduler looks for.
        return getattr(self._method, name)

    def remove(self) -> None:
        """Put back what was there."""
        _put_back(self._owner, self._name, self, self._own)

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


class Refused:
    """A way to copy a module or an optimizer, closed."""

    def __init__(self, owner: nn.Module | Optimizer, name: str) -> None:
        self._owner, self._name = owner, name
        self._own = vars(owner).get(name)
        vars(owner)[name] = self

    def __call__(self, *args: Any) -> Any:
        """Say so."""
        raise _copied(type(self._owner).__name__)

    def remove(self) -> None:
        """Open it again."""
        _put_back(self._owner, self._name, self, self._own)


class Hook:
    """A hook among the watched methods."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def remove(self) -> None:
        """Take it away."""
        self._handle.remove()


def _put_back(owner: Owner, name: str, ours: object, own: object) -> None:
    if vars(owner).get(name) is not ours:
        return  # somebody wrapped it since; it calls through
    if own is None:
        del vars(owner)[name]
    else:
        vars(owner)[name] = own


def _copied(owner: str) -> UsageError:
    return UsageError(
        f"The {owner} cannot be copied or pickled while a compiled step owes it an "
        "update: call flush() of the step first, or pass last_train_step=True."
    )
