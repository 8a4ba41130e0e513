"""One run of a model on shapes, recorded: the calls of modules and of torch functions.

The model runs once on fake tensors: no weights are read, no memory is used, any size
will do. What needs values (``.item()``, ``nonzero``) cannot run so, and is reported.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from torchspmd import _torch
from torchspmd.parallel.linear import linear_form
from torchspmd.parallel.plan.copies import copy_shapes, to_shape, traces_kept

Inputs = Mapping[str, Any] | tuple[Any, ...]
T = TypeVar("T")
# What fake tensors raise where a program reads values.
_NEEDS_VALUES = ("DataDependentOutputException", "DynamicOutputShapeException")


class TensorInfo(NamedTuple):
    """One tensor of one call.

    Attributes:
        shape: Its whole shape.
        dtype: Its element type.
        needs_grad: A gradient is computed for it.
        identity: The same number for the same tensor in other calls.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool
    identity: int


class ModuleCall(NamedTuple):
    """One call of one module: its tensors by position and by name."""

    path: str
    inputs: tuple[TensorInfo | None, ...]
    keywords: dict[str, TensorInfo | None]
    outputs: tuple[TensorInfo | None, ...]


class FunctionCall(NamedTuple):
    """One call of a torch function; ``outputs`` are what it made or wrote."""

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]

    @property
    def inputs(self) -> list[torch.Tensor]:
        """Its tensor arguments."""
        return list(_torch.leaves_of(torch.Tensor, (self.args, self.kwargs)))

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """An argument that may be passed by position or by name."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[place] if len(self.args) > place else default


@dataclass(frozen=True, slots=True)
class Recording:
    """What one run of a model has shown.

    Attributes:
        state: The tensors that the parameters and buffers were, by path.
        module_calls: Calls of the modules that were asked for, in order of their start.
        function_calls: Calls of torch functions. They keep their tensors alive, so that
            an ``id`` means one tensor throughout.
        inputs: The tensors among its inputs.
        output: What the model returned.
        why_eval: Why it was run in eval mode: what failed in training mode; else empty.
    """

    state: dict[str, torch.Tensor]
    module_calls: list[ModuleCall]
    function_calls: list[FunctionCall]
    inputs: list[torch.Tensor]
    output: Any
    why_eval: str = ""


class NotRunnableError(Exception):
    """The model cannot run on shapes alone; the text says why.

    Attributes:
        path: The module whose forward failed.
        needs_values: It failed because a value of a tensor was asked for.
    """

    def __init__(self, text: str, path: str = "", needs_values: bool = False) -> None:
        super().__init__(text)
        self.path, self.needs_values = path, needs_values


def record(model: nn.Module, inputs: Inputs, paths: Collection[str] = ()) -> Recording:
    """Run the model on shapes; ``paths`` are the modules whose calls are of interest.

    Raises:
        NotRunnableError: The model needs values to run.
    """
    recording, why = try_modes(model, lambda copied: _record(copied, inputs, paths))
    return dataclasses.replace(recording, why_eval=why)


def try_modes(model: nn.Module, run: Callable[[nn.Module], T]) -> tuple[T, str]:
    """The result of a run of a copy of the model, and why it was in eval mode, if it was.

    What needs values in training mode, as to drop whole layers, is run in eval mode.
    """
    try:
        return run(copy_shapes(model)), ""
    except NotRunnableError as error:
        if not error.needs_values or not model.training:
            raise
        return run(copy_shapes(model).eval()), str(error)


def _record(copied: nn.Module, inputs: Inputs, paths: Collection[str]) -> Recording:
    state = give_shapes(copied)
    args, kwargs = shapes_of(inputs)
    module_calls: list[ModuleCall] = []
    function_calls: list[FunctionCall] = []
    with contextlib.ExitStack() as stack:
        for path in paths:
            watcher = _ModuleWatcher(path, module_calls)
            module = copied.get_submodule(path)
            for hook in (
                module.register_forward_pre_hook(watcher.enter, with_kwargs=True),
                module.register_forward_hook(watcher.leave, with_kwargs=True),
            ):
                stack.enter_context(hook)
        stack.enter_context(on_shapes(copied))
        stack.enter_context(_FunctionRecorder(function_calls))
        output = copied(*args, **kwargs)
    tensors = list(_torch.leaves_of(torch.Tensor, (args, kwargs)))
    return Recording(state, module_calls, function_calls, tensors, output)


def shapes_of(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs without values, by position and by name."""
    if isinstance(inputs, Mapping):
        return (), {name: to_shape(value) for name, value in inputs.items()}
    return tuple(map(to_shape, inputs)), {}


@contextlib.contextmanager
def on_shapes(model: nn.Module) -> Iterator[None]:
    """Where a copied model runs without values; what it raises is a NotRunnableError."""
    running: list[str] = []
    try:
        with (
            _torch.shape_mode(),
            torch.device("cpu"),
            traces_kept(),
            _noting(model, running),
            _GroupedProducts(),
        ):
            yield
    except Exception as error:  # the user's forward can raise anything
        path = running[-1] if running else ""
        where = f"'{path}'" if path else "its forward"
        first_line = str(error).strip().partition("\n")[0]
        needs_values = type(error).__name__ in _NEEDS_VALUES
        if needs_values:
            text = f"{where} needs the values of tensors, by {first_line}"
        else:
            text = f"{type(error).__name__} in {where}: {first_line}"
        raise NotRunnableError(text, path, needs_values) from error


@contextlib.contextmanager
def _noting(model: nn.Module, running: list[str]) -> Iterator[None]:
    """Note the paths of the modules that are running; after an error, that were."""
    paths = {id(module): path for path, module in model.named_modules()}

    def enter(module: nn.Module, args: Any) -> None:
        if id(module) in paths:
            running.append(paths[id(module)])

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if id(module) in paths:
            running.pop()

    with register_module_forward_pre_hook(enter), register_module_forward_hook(leave):
        yield


def guess_inputs(model: nn.Module, batch: int, seq: int) -> Inputs:
    """Token ids for a model with an embedding, else features for its first Linear."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return (torch.empty(batch, seq, dtype=torch.long, device="meta"),)
        form = linear_form(module)
        if form is not None:
            dtype = module.get_parameter("weight").dtype
            shape = (batch, seq, form.inside)
            return (torch.empty(shape, dtype=dtype, device="meta"),)
    raise NotRunnableError("it has no Embedding and no Linear")


def describe_inputs(inputs: Inputs) -> str:
    """The shapes of the model's inputs, for a sentence."""
    if isinstance(inputs, Mapping):
        labelled = [(f"{name}=", value) for name, value in inputs.items()]
    else:
        labelled = [("", value) for value in inputs]
    return ", ".join(
        f"{label}{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        for label, value in labelled
        if isinstance(value, torch.Tensor)
    )


def give_shapes(copied: nn.Module) -> dict[str, torch.Tensor]:
    """Give a copied model fake tensors for its parameters and buffers; ties are kept.

    Returns:
        The tensors, under each of their names.
    """
    state: dict[str, torch.Tensor] = {}
    state |= copied.named_parameters(remove_duplicate=False)
    state |= copied.named_buffers(remove_duplicate=False)
    fakes = {id(tensor): to_shape(tensor) for tensor in state.values()}
    for path, tensor in state.items():
        owner, _, name = path.rpartition(".")
        module = copied.get_submodule(owner)
        if not isinstance(module, torch.jit.ScriptModule):  # the user's: it has no copy
            setattr(module, name, fakes[id(tensor)])
    return {path: fakes[id(tensor)] for path, tensor in state.items()}


class _GroupedProducts(TorchFunctionMode):
    """Lets grouped products run: on shapes they take bfloat16 only, unlike with values."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") not in ("grouped_mm", "_grouped_mm"):
            return func(*args, **(kwargs or {}))
        half = [t.to(torch.bfloat16) for t in args[:2]]
        return func(*half, *args[2:], **(kwargs or {})).to(args[0].dtype)


class _FunctionRecorder(TorchFunctionMode):
    def __init__(self, calls: list[FunctionCall]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        result = func(*args, **kwargs)
        made = args[0] if name == "__setitem__" else result
        outputs = list(_torch.leaves_of(torch.Tensor, made))
        self._calls.append(FunctionCall(func, name, args, kwargs, outputs))
        return result


class _ModuleWatcher:
    """Records the calls of one module, which may call itself."""

    def __init__(self, path: str, calls: list[ModuleCall]) -> None:
        self._path, self._calls = path, calls
        self._open: list[int] = []
        self._alive: list[torch.Tensor] = []  # ids stay unique while tensors live

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._open.append(len(self._calls))
        keywords = {name: self._info(value) for name, value in kwargs.items()}
        inputs = tuple(map(self._info, args))
        self._calls.append(ModuleCall(self._path, inputs, keywords, ()))

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        place = self._open.pop()
        outputs = output if isinstance(output, tuple) else (output,)
        infos = tuple(map(self._info, outputs))
        self._calls[place] = self._calls[place]._replace(outputs=infos)

    def _info(self, value: Any) -> TensorInfo | None:
        if not isinstance(value, torch.Tensor):
            return None
        self._alive.append(value)
        return TensorInfo(
            tuple(value.shape), value.dtype, value.requires_grad, id(value)
        )
