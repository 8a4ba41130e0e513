"""Compilation in a rehearsal: the function runs as it is, its operators as one region.

What a compiled region allocates and launches depends on a compiler that is not run here.
Its operators are recorded one by one, with the number of their region.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from torchspmd.errors import UsageError
from torchspmd.rehearse.recorder import Recorder
from torchspmd.step.compiled import CompiledStep

__all__ = ["eager_compilation"]

_NOTE = (
    "torch.compile: compiled regions run operator by operator; intermediate tensors that "
    "the compiler would fuse away are counted"
)

_STEP_NOTE = (
    "torchspmd.compile: the step runs as it is written, operator by operator; what its "
    "program would fuse and overlap is not seen"
)


def _reduce_gradients(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """What ``parallel="replicate"`` adds to a step, one gradient at a time."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)


@contextlib.contextmanager
def eager_compilation(recorder: Recorder) -> Iterator[None]:
    """Nothing is compiled inside; calls of what would be are numbered."""
    numbers = iter(range(1 << 62))

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            outer, recorder.region = recorder.region, next(numbers)
            try:
                return function(*args, **kwargs)
            finally:
                recorder.region = outer

        return call

    def compile(model: Any = None, **options: Any) -> Any:
        recorder.values.note(_NOTE)
        if model is None:
            return lambda function: compile(function, **options)
        if isinstance(model, nn.Module):
            model.forward = watched(model.forward)
            return model
        return watched(model)

    def compile_in_place(module: nn.Module, *args: Any, **options: Any) -> None:
        compile(module)

    def run_step(step: CompiledStep, *args: Any, **kwargs: Any) -> Any:
        mode = step.parallel_mode
        if mode is not None and mode.parallel_style == "fully_shard":
            raise UsageError(
                "torchspmd.compile(parallel='fully_shard') cannot be rehearsed: parameters "
                "are gathered by the captured program, which is not built here. Call "
                "torch.distributed.fsdp.fully_shard on the model instead, for the same "
                "memory and communication; or record it with torchspmd trace."
            )
        recorder.values.note(_STEP_NOTE)
        kwargs.pop("last_train_step", None)
        hook = None
        if mode is not None and dist.is_initialized():
            hook = register_optimizer_step_pre_hook(_reduce_gradients)
        try:
            return watched(step.__wrapped__)(*args, **kwargs)  # type: ignore[attr-defined]
        finally:
            if hook is not None:
                hook.remove()

    with (
        mock.patch.object(CompiledStep, "__call__", run_step),
        mock.patch.object(torch, "compile", compile),
        mock.patch.object(nn.Module, "compile", compile_in_place),
    ):
        yield
