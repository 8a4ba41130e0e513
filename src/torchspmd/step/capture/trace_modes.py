"""Modes of torch that are active while a step is traced, and functions replaced there."""

import contextlib
import functools
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import FrameType, FunctionType
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode, handle_torch_function

from torchspmd import _torch
from torchspmd.errors import CaptureError, CaptureWarning
from torchspmd.step.capture.refusals import no_input_error, noting_refusals
from torchspmd.step.capture.user_code import (
    calling_line,
    is_users_file,
    is_users_function,
    printing_line,
    runs_for_user,
)


class FunctionMode(TorchFunctionMode, ABC):
    """Sees every function of torch that the user's code calls, with all its arguments."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if is_users_function(func):
            func = _called_by_name(func, sys._getframe(1))
        return self.call(func, args, kwargs or {})

    @abstractmethod
    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Called in the place of a function."""


def _called_by_name(func: FunctionType, frame: FrameType) -> FunctionType:
    """The function of torch that asks a mode, where the user's is in its place by name.

    With ``F.silu = mine``, torch's own ``silu`` asks the mode to call ``silu``, by which it
    means itself. Called again, ``mine`` would do twice what it does around torch's.
    """
    asks = frame.f_back
    if frame.f_code is not handle_torch_function.__code__ or asks is None:
        return func
    code, table = asks.f_code, dict(asks.f_globals)
    if table.get(code.co_name) is not func:
        return func
    own = table[code.co_name] = FunctionType(code, table)
    return own


class OperatorMode(_torch.TorchDispatchMode, ABC):
    """Sees every operator that is traced, with all its arguments."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Two of three operators of a traced step ask for this, and no graph holds it.
        device = _torch.asked_device(func, args)
        if device is not None:
            return device
        return self.call(func, args, kwargs or {})

    @abstractmethod
    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Called in the place of an operator."""


@contextlib.contextmanager
def replaced(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Give classes and modules other attributes (owner, name, value); put all back."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in attributes:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


# ----------------------------------------------------------------------------
# The clock: the graph keeps what it was.

_CLOCKS = ("time", "monotonic", "perf_counter", "process_time")


@contextlib.contextmanager
def noting_clocks(lines: list[str]) -> Iterator[None]:
    """Inside, a line of the user's own that reads the clock is added to a list."""

    def watched(read: Callable[[], Any]) -> Callable[[], Any]:
        def wrapper() -> Any:
            if is_users_file(sys._getframe(1).f_code.co_filename):
                lines.append(calling_line())
            return read()

        return wrapper

    names = [name + unit for name in _CLOCKS for unit in ("", "_ns")]
    watching = [(time, name, watched(getattr(time, name))) for name in names]
    with replaced(*watching):
        yield


def warn_of_clocks(function: str, lines: list[str]) -> None:
    """Warn where a step reads the clock: no later call would."""
    if lines:
        text = "\n".join(f"  * {line}" for line in dict.fromkeys(lines))
        warnings.warn(
            f"compile on {function!r}: the step reads the clock, which it does once, while "
            f"it is captured\n\n{text}\n\nEach call goes on with that time. Read the "
            "clock where the step is called, and pass what depends on it as an argument.",
            CaptureWarning,
            stacklevel=2,
        )


# ----------------------------------------------------------------------------
# Functions of torch that are no operators, so that no graph could hold them.


def _refuse_data_assignment() -> None:
    # It cannot be taken for a copy: what still holds the old memory keeps the old values.
    raise CaptureError(
        "compile: the step assigns to the data of a tensor, which is no operator "
        f"and would be lost\n\n  * {calling_line()}\n\nWrite the values into the "
        "tensor: `with torch.no_grad(): p.copy_(...)` instead of `p.data = ...`."
    )


def _refuse_printing() -> None:
    line = printing_line()
    if line is not None:
        raise CaptureError(
            "compile: the step prints a tensor, which has no value while the step is "
            f"captured\n\n  * {line}\n\nReturn the tensor and print it after the step."
        )


_REFUSED: dict[Any, Callable[[], None]] = {
    torch.Tensor.data.__set__: _refuse_data_assignment,  # type: ignore[attr-defined]  # a property
    torch.Tensor.__repr__: _refuse_printing,  # print, str
    torch.Tensor.__format__: _refuse_printing,  # f"{loss}"
}


# ----------------------------------------------------------------------------
# Functions of torch whose kernel looks at a value without need: for a warning, or to add a
# number instead of a tensor.


def _cov(x: torch.Tensor, *, correction: int = 1, **weights: Any) -> torch.Tensor:
    if any(weight is not None for weight in weights.values()):
        raise CaptureError(
            "compile: torch.cov with weights checks their values, which a graph does not "
            f"have before it runs\n\n  * {calling_line()}\n\nMultiply by the weights in "
            "the step itself."
        )
    rows = x.reshape(1, -1) if x.ndim < 2 else x
    count = rows.shape[1]
    apart = rows - rows.mean(1, keepdim=True)
    return (apart @ apart.T.conj() / max(count - correction, 0)).squeeze()


def _corrcoef(x: torch.Tensor) -> torch.Tensor:
    cov = _cov(x)
    if cov.ndim == 0:
        return cov / cov
    mode = (cov.diag().real if cov.is_complex() else cov.diag()).sqrt()
    scaled = cov / mode[:, None] / mode[None, :]
    return scaled if scaled.is_complex() else scaled.clip(-1, 1)


def _each(name: str) -> Callable[..., Any]:
    def run(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        made = [getattr(tensor, name)(*args, **kwargs) for tensor in tensors]
        return None if name.endswith("_") else made

    return run


_IN_PARTS: dict[Any, Callable[..., Any]] = {
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
}
_ON_LISTS = {
    _torch.on_lists(name): _each(name)
    for name in ("add", "add_", "mul", "mul_", "div", "div_")
}


def _is_by_tensor(tensors: Any, other: Any = None, *rest: Any, **kwargs: Any) -> bool:
    return isinstance(other, torch.Tensor)


# ----------------------------------------------------------------------------
# Comparisons of a random number that have one result, whatever the number is.
#
# Models that may skip layers ask ``torch.rand([]) < self.layerdrop`` for each of them, also
# where ``layerdrop`` is 0. A number of ``torch.rand`` is never below 0, so that the answer
# needs no value; the number is still drawn, as in eager.

_IS_LESS = (torch.Tensor.__lt__, torch.Tensor.lt, torch.lt)


@final
class _KnownComparisons:
    """Knows that ``torch.rand([]) < 0`` is false; other comparisons need values."""

    def __init__(self) -> None:
        # Each with its version: a write changes what is known about it.
        self._drawn: dict[int, tuple[torch.Tensor, int]] = {}
        self._never: dict[int, tuple[torch.Tensor, int]] = {}

    def is_false(self, func: Any, args: Any) -> bool:
        """Whether a tensor is asked for its truth that is false whatever is drawn."""
        return func is torch.Tensor.__bool__ and _is_in(self._never, args[0])

    def note(self, func: Any, args: Any, made: Any) -> None:
        """Remember what a call made, if something is known about it."""
        if func is torch.rand and made.ndim == 0:
            self._drawn[id(made)] = (made, _torch.version_of(made))
        elif func in _IS_LESS and len(args) == 2 and _is_in(self._drawn, args[0]):
            if type(args[1]) in (int, float) and args[1] <= 0:
                self._never[id(made)] = (made, _torch.version_of(made))


def _is_in(known: dict[int, tuple[torch.Tensor, int]], value: Any) -> bool:
    entry = known.get(id(value))
    return entry is not None and entry[1] == _torch.version_of(value)


@final
class StepFunctions(FunctionMode):
    """Refuses functions of torch that would happen once, at capture, or be lost.

    Others that need a value without need are computed in another way.

    Args:
        refused: A list to which what was refused is added.
    """

    def __init__(self, refused: list[Exception]) -> None:
        super().__init__()
        self._refused = refused
        self._comparisons = _KnownComparisons()

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Refuse a function of the table, or run it."""
        if self._comparisons.is_false(func, args):
            return False
        refuse, in_parts = _REFUSED.get(func), _IN_PARTS.get(func)
        if func in _ON_LISTS and _is_by_tensor(*args, **kwargs):
            # Torch's optimizers count so, by a number that is known.
            in_parts = _ON_LISTS[func] if runs_for_user(sys._getframe(2)) else None
        with noting_refusals(self._refused):
            if refuse is not None:
                refuse()
            made = (in_parts or func)(*args, **kwargs)
        self._comparisons.note(func, args, made)
        return made


# ----------------------------------------------------------------------------
# Operators that a functional graph would lose, or whose writes it would not notice.
#
# Eager operators on lists (``_foreach_add_``) raise the version of each tensor that they
# write; on tensors without values they do not. What was read from a tensor, or gathered
# from it, is kept for as long as its version stays: it would be taken for the value of now.


@final
class StepOperators(OperatorMode):
    """Refuses operators that only have effects; counts the writes into lists.

    Args:
        refused: A list to which what was refused is added.
        note: Told before each operator is called.
    """

    def __init__(self, refused: list[Exception], note: Callable[[], None]) -> None:
        super().__init__()
        self._refused = refused
        self._note = note

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Check and run an operator."""
        with noting_refusals(self._refused):
            _check_operator(func)
        written = [*_torch.written_values(func, args, kwargs)]
        if not all(map(_has_no_values, written)):
            raise no_input_error()  # before it is written: it is the user's own
        self._note()
        result = func(*args, **kwargs)
        for value in written:
            if isinstance(value, (list, tuple)):
                torch.autograd.graph.increment_version(list(_parts(value)))
        return result


def _has_no_values(written: Any) -> bool:
    """Whether what an operator writes is a tensor of the trace, or a list of such."""
    parts = written if isinstance(written, (list, tuple)) else (written,)
    plain = (_torch.plain_tensor(each) for each in parts if each is not None)
    return not any(type(each) in _REAL and not each.is_meta for each in plain)


_REAL = (torch.Tensor, torch.nn.Parameter)


def _check_operator(operator: Any) -> None:
    if operator.namespace == "c10d":
        raise CaptureError(
            "compile: the step calls torch.distributed itself, which cannot be "
            f"captured ({operator})\n\n  * {calling_line()}\n\nGradients are reduced "
            "already, without a call. Reduce or gather what the step returns after "
            "the step, and put barriers around it. Inside of the step use the "
            "functional form, which returns its result: all_reduce(), "
            "all_gather_tensor(), ... of "
            "torch.distributed._functional_collectives."
        )
    # Nothing in the graph would need it, so it would be removed as dead code.
    if _only_has_effects(operator):
        raise CaptureError(
            f"compile: the step calls {operator}, which returns nothing and by its schema "
            "writes into nothing, so that nothing in a graph needs it and it would never "
            "run. Return its argument from the step and call it after the step."
        )


# Kept for each operator: asked at every call of a traced step.
_only_has_effects = functools.cache(_torch.only_has_effects)


def _parts(tensors: Any) -> Iterator[torch.Tensor]:
    """Each tensor, and of a DTensor its shard too, which has a version of its own."""
    for tensor in tensors:
        if tensor is None:  # optional ones
            continue
        yield tensor
        local = _torch.plain_tensor(tensor)
        if local is not tensor:
            yield local


# ----------------------------------------------------------------------------
# transformers looks into an attention mask to leave it out where nothing is masked, unless
# the mask is a fake tensor: then it computes with every mask, which is right for all
# batches of a graph. It does not know a DTensor around a fake tensor for one.

_ASKS = ("transformers.utils.import_utils", "is_fake_tensor")


def fake_for_transformers() -> contextlib.AbstractContextManager[None]:
    """Inside, transformers takes a DTensor around a fake tensor for a fake one."""
    # Nothing is imported for this: a model of transformers has imported it already.
    module, name = _ASKS
    library = sys.modules.get(module)
    asks: Callable[[Any], bool] | None = getattr(library, name, None)
    if asks is None:
        # Another version: what looks into a tensor is refused, by its line.
        return contextlib.nullcontext()
    return replaced((library, name, lambda value: asks(_torch.plain_tensor(value))))
