"""How a model calls its modules: shapes and dtypes, from a run that computes nothing.

The model runs once on the meta device: no weights are read, no memory is used, any size
will do. What needs values (``.item()``, ``nonzero``) cannot run so, and is reported.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

Inputs = Mapping[str, Any] | tuple[Any, ...]


class Facts(NamedTuple):
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


class Call(NamedTuple):
    """One call of one module: its tensors by position and by name, in start order."""

    path: str
    inputs: tuple[Facts | None, ...]
    keywords: dict[str, Facts | None]
    outputs: tuple[Facts | None, ...]


class NotRunnableError(Exception):
    """The model cannot run on shapes alone; the text says why."""


def run_on_shapes(
    model: nn.Module, paths: Collection[str], inputs: Inputs
) -> list[Call]:
    """Every call of the named modules, in the order in which they start."""
    recorder = _Recorder()
    with contextlib.ExitStack() as stack:
        for path in paths:
            stack.enter_context(recorder.watching(path, model.get_submodule(path)))
        call_on_meta(model, meta_state(model), inputs)
    return recorder.calls


def call_on_meta(
    model: nn.Module, state: dict[str, torch.Tensor], inputs: Inputs
) -> Any:
    """The model's output on the meta device, with these tensors as its state."""
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        named = {name: to_meta(value) for name, value in inputs.items()}
    else:
        positional = tuple(map(to_meta, inputs))
    try:
        with torch.device("meta"), random_numbers_kept():
            return functional_call(model, state, positional, named)
    except Exception as error:  # the user's forward can raise anything
        first_line = str(error).strip().partition("\n")[0]
        raise NotRunnableError(f"{type(error).__name__}: {first_line}") from error


def random_numbers_kept() -> contextlib.AbstractContextManager[None]:
    """A context after which the user's generators are as before."""
    is_used = torch.cuda.is_available() and torch.cuda.is_initialized()
    devices = range(torch.cuda.device_count()) if is_used else ()
    return torch.random.fork_rng(devices=list(devices))


def guess_inputs(model: nn.Module, batch: int, seq: int) -> Inputs:
    """Token ids for a model with an embedding, else features for its first Linear."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return (torch.empty(batch, seq, dtype=torch.long, device="meta"),)
        if isinstance(module, nn.Linear):
            shape = (batch, seq, module.in_features)
            return (torch.empty(shape, dtype=module.weight.dtype, device="meta"),)
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


def to_meta(value: Any) -> Any:
    """A tensor without values; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_like(value, device="meta", requires_grad=value.requires_grad)


def meta_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """A stand-in without values for each parameter and buffer, ties kept."""
    made: dict[int, torch.Tensor] = {}
    state = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    for _, tensor in state:
        made.setdefault(id(tensor), to_meta(tensor))
    return {path: made[id(tensor)] for path, tensor in state}


class _Recorder:
    """Writes down the calls of the modules that it watches."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._open: dict[str, list[int]] = {}
        self._alive: list[torch.Tensor] = []  # ids stay unique while tensors live

    @contextlib.contextmanager
    def watching(self, path: str, module: nn.Module) -> Iterator[None]:
        handles = (
            module.register_forward_pre_hook(self._enter(path), with_kwargs=True),
            module.register_forward_hook(self._leave(path)),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._open.setdefault(path, []).append(len(self.calls))
            keywords = {name: self._facts(value) for name, value in kwargs.items()}
            inputs = tuple(map(self._facts, args))
            self.calls.append(Call(path, inputs, keywords, ()))

        return enter

    def _leave(self, path: str) -> Any:
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            place = self._open[path].pop()
            outputs = output if isinstance(output, tuple) else (output,)
            facts = tuple(map(self._facts, outputs))
            self.calls[place] = self.calls[place]._replace(outputs=facts)

        return leave

    def _facts(self, value: Any) -> Facts | None:
        if not isinstance(value, torch.Tensor):
            return None
        self._alive.append(value)
        return Facts(tuple(value.shape), value.dtype, value.requires_grad, id(value))
