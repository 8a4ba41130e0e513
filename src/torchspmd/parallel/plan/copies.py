"""A copy of a model that may be run without an effect on the user's objects.

To judge a plan the model's own code is run, on shapes. It may count its calls, fill
lists, write buffers, draw random numbers. So it is run on a copy: modules, their attributes
and the closures of their hooks are new objects, parameters and buffers have no values.
What code reaches otherwise, through global names, no copy can hold back:
``reaches_globals`` says where that is.
"""

import collections
import contextlib
import copy
import dis
import enum
import io
import logging
import random
import sys
from collections.abc import Iterator, MutableMapping
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchspmd import _torch

# Packages whose functions have no effects that last, but for random numbers.
_HARMLESS = {
    *("collections", "contextlib", "copy", "einops", "enum", "functools", "itertools"),
    *("logging", "math", "numpy", "operator", "random", "torch", "torchspmd", "typing"),
    *("warnings", "builtins", "cmath", "dataclasses"),
}
_PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    bool,
    type(None),
    enum.Enum,
    type,
    ModuleType,
)
_PLAIN_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_OWN_WRITES = ("STORE_GLOBAL", "DELETE_GLOBAL")


def to_shape(value: Any) -> Any:
    """A fake tensor, to compute with; other things copied, with such tensors inside."""
    if isinstance(value, torch.Tensor):
        with _torch.shape_mode():
            made = torch.empty_like(value, device="cpu")
            if isinstance(value, nn.Parameter):
                return nn.Parameter(made, value.requires_grad)
            made.requires_grad = value.requires_grad
            return made
    if type(value) in (list, tuple):
        return type(value)(map(to_shape, value))
    if type(value) is dict:
        return {key: to_shape(item) for key, item in value.items()}
    return _copied(value, {})


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """The same without values and memory; most copies are traced only, and never run."""
    made = torch.empty_like(tensor, device="meta", requires_grad=tensor.requires_grad)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(made, tensor.requires_grad) if is_parameter else made


def copy_shapes(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters and buffers have no values; ties are kept."""
    memo: dict[int, Any] = {}
    state = [*model.parameters(), *model.buffers()]
    for tensor in state:
        # One without a shape yet has no values either.
        memo[id(tensor)] = tensor if is_lazy(tensor) else _on_meta(tensor)
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    for module in modules:
        memo[id(module)] = object.__new__(type(module))
    for module in modules:
        attributes = {**_shared_containers(type(module)), **vars(module)}
        found = {name: _copied(value, memo) for name, value in attributes.items()}
        memo[id(module)].__dict__ = found
    return memo.get(id(model), model)


def _shared_containers(kind: type) -> dict[str, Any]:
    """Mutable values, such as lists, that a class holds for all its objects."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] not in _HARMLESS:
            containers = (list, dict, set, collections.deque)
            found |= {
                name: value
                for name, value in vars(base).items()
                if isinstance(value, containers) and not name.startswith("__")
            }
    return found


def _copied(value: Any, memo: MutableMapping[int, Any]) -> Any:
    """A deep copy; what cannot be copied (a process group, a file) as it is."""
    if isinstance(value, FunctionType):
        return _copied_function(value, memo)
    if type(value) in (dict, collections.OrderedDict):  # hooks, modules, parameters
        items = ((key, _copied(item, memo)) for key, item in value.items())
        return type(value)(items)
    # Forget what a failed copy has begun.
    trial: Any = collections.ChainMap({}, memo)
    try:
        made = copy.deepcopy(value, trial)
    except Exception:  # the user's objects can raise anything
        return value
    memo.update(trial.maps[0])
    return made


def _copied_function(function: FunctionType, memo: MutableMapping[int, Any]) -> Any:
    """The function on copies of what it closes over."""
    if not function.__closure__:
        return function
    if id(function) not in memo:
        cells = tuple(_copied_cell(cell, memo) for cell in function.__closure__)
        made = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            cells,
        )
        made.__kwdefaults__ = function.__kwdefaults__
        memo[id(function)] = made
    return memo[id(function)]


def _copied_cell(cell: CellType, memo: MutableMapping[int, Any]) -> CellType:
    try:
        return CellType(_copied(cell.cell_contents, memo))
    except ValueError:  # nothing in it yet
        return cell


# ----------------------------------------------------------------------------
# What a run of the copy could still change: global objects, streams, random numbers.


def reaches_globals(module: nn.Module) -> bool:
    """Whether the module's forward may change something that no copy of it holds."""
    return _reaches(type(module).forward, type(module), set())


def _reaches(function: Any, kind: type, seen: set[CodeType]) -> bool:
    if not isinstance(function, FunctionType):
        return True
    if function.__code__ in seen or _is_harmless(function.__module__):
        return False
    seen.add(function.__code__)
    cells = [cell.cell_contents for cell in function.__closure__ or () if _has(cell)]
    if any(_may_change(value, kind, seen) for value in cells):
        return True
    for code in _codes(function.__code__):
        for step in dis.get_instructions(code):
            if step.opname in _OWN_WRITES:
                return True
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = function.__globals__.get(step.argval)
                if _may_change(value, kind, seen):
                    return True
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                method = getattr(kind, str(step.argval), None)
                if isinstance(method, FunctionType) and _reaches(method, kind, seen):
                    return True
    return False


def _has(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _may_change(value: Any, kind: type, seen: set[CodeType]) -> bool:
    if isinstance(value, ModuleType):
        return not _is_harmless(value.__name__)
    if isinstance(value, FunctionType):
        return _reaches(value, kind, seen)
    if isinstance(value, (tuple, frozenset)):
        return any(_may_change(item, kind, seen) for item in value)
    if isinstance(value, (*_PLAIN, *_PLAIN_OF_TORCH, logging.Logger)):
        return False
    is_function = isinstance(value, BuiltinFunctionType) or callable(value)
    return not (is_function and _is_harmless(getattr(value, "__module__", "") or ""))


def _is_harmless(module: str) -> bool:
    return module.partition(".")[0] in _HARMLESS


@contextlib.contextmanager
def traces_kept() -> Iterator[None]:
    """A context after which generators are as before; what is printed is not shown."""
    numpy: Any = sys.modules.get("numpy")
    of_python = random.getstate()
    of_numpy = numpy.random.get_state() if numpy is not None else None
    is_used = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if is_used else ()
    try:
        with (
            torch.random.fork_rng(devices=list(devices)),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            yield
    finally:
        random.setstate(of_python)
        if of_numpy is not None:
            numpy.random.set_state(of_numpy)
